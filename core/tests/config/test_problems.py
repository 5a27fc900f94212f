"""Problems: all at once, each with path, value, source, what is allowed, and a near name."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import ConfigError, load_config, load_draft
from pegboard.config.errors import Problem


def problems(**arguments: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, "model": "m", **arguments})
    return caught.value.problems


def the_problem(**arguments: Any) -> Problem:
    found = problems(**arguments)
    assert len(found) == 1, found
    return found[0]


def test_a_dtype_that_is_none_lists_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, model="m", cli={"--dtype": "foo"})
    assert str(caught.value) == (
        "1 problem in the configuration:\n"
        "  - dtype: 'foo' is not allowed (allowed: one of auto, float32, bfloat16, float16) [set by option --dtype]"
    )


def test_a_near_choice_is_suggested() -> None:
    assert "did you mean float32?" in the_problem(dtype="flaot32").remedy
    assert "did you mean bfloat16?" in the_problem(dtype="BFloat16").remedy


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('max_num_sqs = 3\nscheduler = 5\n[kv_cache]\nblock_size = 0\nswap_space = "1 lot"\n')
    found = problems(file=file, env={"PEGBOARD_DEVICES": "cpu"}, cli={"--set sedd": "1"}, dtype="foo", strict=True, model=3)
    assert [p.where for p in found] == [
        "max_num_sqs",
        "scheduler",
        "PEGBOARD_DEVICES",
        "sedd",
        "strict",
        "kv_cache.block_size",
        "kv_cache.swap_space",
        "model",
        "dtype",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("scheduler.max_num_sqs", "scheduler.max_num_seqs"),
        ("max_num_sqs", "scheduler.max_num_seqs"),
        ("max-num-seqs", "scheduler.max_num_seqs"),
        ("schedular.max_num_seqs", "scheduler.max_num_seqs"),
        ("executor.max_num_seqs", "scheduler.max_num_seqs"),
        ("modle", "model"),
        ("shceduler", "scheduler"),
        ("gpu_memory_utilization", "kv_cache.memory_fraction"),
        ("tp_size", "executor.tensor_parallel_size"),
        ("max_batch_size", "scheduler.max_num_seqs"),
    ],
)
def test_unknown_keyword_arguments_suggest_the_field(key: str, meant: str) -> None:
    problem = the_problem(**{key: 1})
    assert (problem.where, problem.message, problem.remedy) == (key, "unknown key", f"did you mean {meant}?")
    assert problem.sources == (f"keyword argument {key}",)


def test_unknown_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("scheduler:\n  max_num_sqs: 4\nmax_num_seqs: 4\nquux: 1\n")
    found = problems(file=file)
    assert [(p.where, p.remedy) for p in found] == [
        ("scheduler.max_num_sqs", "did you mean scheduler.max_num_seqs?"),
        ("max_num_seqs", "did you mean scheduler.max_num_seqs?"),
        ("quux", "`pegboard config explain` lists the keys"),
    ]
    assert found[0].sources == (f"file {file}, key scheduler.max_num_sqs",)


def test_short_names_are_for_arguments_and_options_not_for_files(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_num_seqs = 4\n")
    assert the_problem(file=file).remedy == "did you mean scheduler.max_num_seqs?"
    assert the_problem(env={"PEGBOARD_MAX_NUM_SEQS": "4"}).remedy == "did you mean PEGBOARD_SCHEDULER__MAX_NUM_SEQS?"
    assert load_config(env={}, model="m", max_num_seqs=4) == load_config(env={}, model="m", cli={"--max-num-seqs": "4"})


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PEGBOARD_SCHEDULER_MAX_NUM_SEQS", "PEGBOARD_SCHEDULER__MAX_NUM_SEQS"),
        ("PEGBOARD_SCHEDULER__MAX_NUM_SQS", "PEGBOARD_SCHEDULER__MAX_NUM_SEQS"),
        ("PEGBOARD_MODLE", "PEGBOARD_MODEL"),
        ("PEGBOARD_PLUGIN_BLOCK", "PEGBOARD_PLUGINS_BLOCK"),
        ("PEGBOARD_CONFIGS", "PEGBOARD_CONFIG"),
        ("PEGBOARD_TP_SIZE", "PEGBOARD_EXECUTOR__TENSOR_PARALLEL_SIZE"),
    ],
)
def test_unknown_environment_variables(variable: str, meant: str) -> None:
    """A variable that nothing reads is refused, not ignored."""
    problem = the_problem(env={variable: "1"})
    assert problem.where == variable
    assert meant in problem.remedy.removeprefix("did you mean ").removesuffix("?").split(" or ")


def test_variables_that_are_no_settings_are_allowed() -> None:
    env = {"PEGBOARD_PLUGINS_ALLOW": "a", "PEGBOARD_PLUGINS_BLOCK": "b", "PEGBOARD_LOG_LEVEL": "info", "PEGBOARDING": "x"}
    assert load_config(env=env, model="m").model == "m"


def test_ambiguous_short_names_list_the_full_paths() -> None:
    for arguments in ({"strict": True}, {"cli": {"--strict": "true"}}):
        assert "it may mean scheduler.strict or plugins.strict" in the_problem(**arguments).message


def test_a_contradiction_inside_one_layer_is_told() -> None:
    twice = the_problem(max_num_seqs=4, scheduler={"max_num_seqs": 8})
    assert twice.where == "scheduler.max_num_seqs"
    assert "4" in twice.message
    assert "8" in twice.message
    assert len(twice.sources) == 2
    same = load_config(env={}, model="m", max_num_seqs=4, scheduler={"max_num_seqs": 4})
    assert same.scheduler.max_num_seqs == 4
    env = {"PEGBOARD_SCHEDULER": '{"queue": "a"}', "PEGBOARD_SCHEDULER__QUEUE": "b"}
    assert the_problem(env=env).where == "scheduler.queue"


@pytest.mark.parametrize(
    ("arguments", "where", "told"),
    [
        ({"scheduler": 5}, "scheduler", "is a section"),
        ({"observability": "x"}, "observability", "is a section"),
        ({"model": {"a": 1}}, "model", "text"),
        ({"env": {"PEGBOARD_MODEL__NAME": "x"}}, "model", "holds a value"),
        ({"env": {"PEGBOARD_SCHEDULER": "{broken"}}, "scheduler", "not valid JSON"),
        ({"env": {"PEGBOARD_PLUGINS__BLOCK": "[broken"}}, "plugins.block", "allowed: a list of text"),
        ({"max_num_seqs": "many"}, "scheduler.max_num_seqs", "an integer from 1 to 2147483647"),
        ({"max_num_seqs": True}, "scheduler.max_num_seqs", "true or false"),
        ({"memory_fraction": 1.5}, "kv_cache.memory_fraction", "a number, above 0 and at most 1"),
        ({"memory": "lots"}, "kv_cache.memory", "a size in bytes, such as 1048576 or '4GiB' or null"),
        ({"cli": {"--scheduler.strict": "perhaps"}}, "scheduler.strict", "true or false"),
        ({"stat_loggers": ["a", 5]}, "observability.stat_loggers[1]", "a list of text"),
    ],
)
def test_wrong_values_say_what_is_allowed(arguments: dict[str, Any], where: str, told: str) -> None:
    problem = the_problem(**arguments)
    assert problem.where == where
    assert told in f"{problem.message} {problem.remedy}"


def test_a_bad_value_that_is_overridden_does_no_harm() -> None:
    draft = load_draft(env={"PEGBOARD_DTYPE": "foo", "PEGBOARD_MODEL": "m"}, dtype="float32")
    assert draft.build().dtype == "float32"
    assert draft.provenance("dtype").overridden[0].problem is not None


def test_a_missing_model_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={})
    (problem,) = caught.value.problems
    assert problem.where == "model"
    assert "--model" in problem.remedy
    assert "PEGBOARD_MODEL" in problem.remedy


@pytest.mark.parametrize(
    ("plugins", "told"),
    [
        ({"enabled": ["My_Plugin"], "block": ["my-plugin"]}, "enabled and blocked"),
        ({"required": ["x>=1"], "block": ["x"]}, "required and blocked"),
        ({"required": ["not a requirement!"]}, "is no requirement: "),
    ],
)
def test_checks_across_fields(plugins: dict[str, Any], told: str) -> None:
    problem = the_problem(plugins=plugins)
    assert told in problem.message
    assert problem.sources


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 64},
        {"num_blocks": 1, "memory": "1GiB"},
        {"num_blocks": 4, "block_size": 16, "max_model_len": 4096},
        {"long_prefill_token_threshold": 4096, "max_num_batched_tokens": 16},
    ],
)
def test_combinations_that_work_are_allowed(fields: dict[str, Any]) -> None:
    load_config(env={}, model="m", **fields)


def test_reading_or_writing_an_unknown_path_raises_with_a_suggestion() -> None:
    draft = load_draft(env={}, model="m")
    for use in (draft.get, draft.provenance, draft.is_set, lambda p: draft.set(p, 1, by="me")):
        with pytest.raises(ConfigError, match=r"did you mean scheduler\.max_num_seqs"):
            use("scheduler.max_num_sqs")
    with pytest.raises(ConfigError, match="is a section"):
        draft.provenance("scheduler")


def test_reading_a_bad_value_raises() -> None:
    with pytest.raises(ConfigError, match="'foo' is not allowed"):
        load_draft(env={}, model="m", dtype="foo").get("dtype")


def test_long_values_are_shortened() -> None:
    assert len(str(the_problem(dtype="x" * 10_000))) < 400


def test_the_error_can_be_pickled() -> None:
    error = ConfigError([Problem("a", "b", "c", ("d",))])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.problems == error.problems
