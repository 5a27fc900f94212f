"""Layers: each overrides the ones below it, and every field remembers who set it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config import ConfigDraft, EngineConfig, Layer, SchedulerConfig, load_config, load_draft
from pegboard.config.names import env_name, flag_name
from pegboard.config.provenance import Origin
from pegboard.config.sources import Given

FIELD = "scheduler.max_num_seqs"


def sources(tmp_path: Path, layers: dict[str, int]) -> dict[str, Any]:
    """Arguments of ``load_draft`` that set ``scheduler.max_num_seqs`` in each of ``layers``."""
    arguments: dict[str, Any] = {"env": {"PEGBOARD_MODEL": "m"}}
    if "file" in layers:
        arguments["file"] = tmp_path / "c.toml"
        arguments["file"].write_text(f"[scheduler]\nmax_num_seqs = {layers['file']}\n")
    if "environment" in layers:
        arguments["env"]["PEGBOARD_SCHEDULER__MAX_NUM_SEQS"] = str(layers["environment"])
    if "command_line" in layers:
        arguments["cli"] = {"--scheduler.max-num-seqs": str(layers["command_line"])}
    if "keyword" in layers:
        arguments["scheduler"] = {"max_num_seqs": layers["keyword"]}
    return arguments


ORDER = ["file", "environment", "command_line", "keyword"]


@pytest.mark.parametrize(("lower", "higher"), list(itertools.combinations(ORDER, 2)))
def test_each_layer_overrides_each_lower_one(tmp_path: Path, lower: str, higher: str) -> None:
    draft = load_draft(**sources(tmp_path, {lower: 3, higher: 5}))
    assert draft.build().scheduler.max_num_seqs == 5
    found = draft.provenance(FIELD)
    assert (found.value, found.origin.layer) == (5, Layer[higher.upper()])
    assert [(a.value, a.origin.layer) for a in found.overridden] == [(3, Layer[lower.upper()]), (64, Layer.DEFAULT)]


@pytest.mark.parametrize("layer", ORDER)
def test_each_layer_overrides_the_default_and_says_who_it_is(tmp_path: Path, layer: str) -> None:
    draft = load_draft(**sources(tmp_path, {layer: 3}))
    assert draft.build().scheduler.max_num_seqs == 3
    expected = {
        "file": f"file {tmp_path / 'c.toml'}, key scheduler.max_num_seqs",
        "environment": "environment variable PEGBOARD_SCHEDULER__MAX_NUM_SEQS",
        "command_line": "option --scheduler.max-num-seqs",
        "keyword": "keyword argument scheduler.max_num_seqs",
    }
    assert str(draft.provenance(FIELD)) == expected[layer]
    assert str(draft.provenance("dtype")) == "default"


VALUES = {
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "seed": st.integers(0, 9),
    "scheduler.max_num_seqs": st.integers(1, 9),
    "scheduler.queue": st.sampled_from(["fcfs", "priority", "mine"]),
    "kv_cache.swap_space": st.integers(0, 9),
    "plugins.strict": st.booleans(),
    "plugins.block": st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
}
LAYERS = [Layer.PLUGIN, Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND_LINE, Layer.KEYWORD, Layer.SCRIPT, Layer.FORCED]


def as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@st.composite
def assignments(draw: st.DrawFn) -> list[tuple[Layer, str, Any]]:
    keys = draw(st.lists(st.tuples(st.sampled_from(LAYERS), st.sampled_from(sorted(VALUES))), unique=True))
    return [(layer, path, draw(VALUES[path])) for layer, path in keys]


@given(assignments())
def test_the_highest_layer_wins_in_any_order_of_arrival(given_values: list[tuple[Layer, str, Any]]) -> None:
    draft = ConfigDraft()
    draft.add(Given(("model",), "m", Origin(Layer.FILE)))
    for layer, path, value in given_values:
        text = layer in (Layer.ENVIRONMENT, Layer.COMMAND_LINE)
        draft.add(Given(tuple(path.split(".")), as_text(value) if text else value, Origin(layer, "s"), text=text))
    config = draft.build()
    for path in VALUES:
        ranked = sorted((v for v in given_values if v[1] == path), key=lambda v: v[0], reverse=True)
        found = draft.provenance(path)
        history = [(a.origin.layer, a.value) for a in found.overridden]
        if ranked:
            assert (found.origin.layer, found.value) == (ranked[0][0], ranked[0][2])
            assert history[:-1] == [(layer, value) for layer, _, value in ranked[1:]]
        else:
            assert found.origin.layer is Layer.DEFAULT
        value: Any = config
        for key in path.split("."):
            value = getattr(value, key)
        assert value == found.value == draft.get(path)


@given(
    st.dictionaries(st.sampled_from(sorted(VALUES)), st.sets(st.sampled_from(["env", "cli", "kwargs"]), min_size=1)), st.data()
)
def test_real_sources_keep_the_order(layers: dict[str, set[str]], data: st.DataObject) -> None:
    env, cli, kwargs = {"PEGBOARD_MODEL": "m"}, {}, {}
    expected = {}
    for path, where in layers.items():
        for layer in ("env", "cli", "kwargs"):
            if layer not in where:
                continue
            value = expected[path] = data.draw(VALUES[path])
            if layer == "env":
                env[env_name(path)] = as_text(value)
            elif layer == "cli":
                cli[flag_name(path)] = as_text(value)
            else:
                kwargs[path] = value
    draft = load_draft(env=env, cli=cli, **kwargs)
    draft.build()
    assert {path: draft.get(path) for path in expected} == expected


def test_environment_goes_into_sections_by_two_underscores_and_in_any_case() -> None:
    env = {
        "PEGBOARD_MODEL": "m",
        "PEGBOARD_EXECUTOR__NAME": "mp",
        "PEGBOARD_Kv_Cache__SWAP_SPACE": "1GiB",
        "PEGBOARD_SCHEDULER": '{"max_num_seqs": 5, "strict": true}',
        "PEGBOARD_ATTENTION": "torch",
        "PEGBOARD_PLUGINS__BLOCK": "a, b",
        "PEGBOARD_OBSERVABILITY__STAT_LOGGERS": '["x,y"]',
        "PEGBOARD_MAX_MODEL_LEN": "null",
        "PEGBOARD_LOG_LEVEL": "debug",
        "UNRELATED": "1",
    }
    config = load_config(env=env)
    assert config == EngineConfig(
        model="m",
        executor={"name": "mp"},
        kv_cache={"swap_space": 1024**3},
        scheduler={"max_num_seqs": 5, "strict": True},
        attention={"backend": "torch"},
        observability={"stat_loggers": ["x,y"]},
        plugins={"block": ["a", "b"]},
    )


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_MODEL", "from-env")
    assert load_config().model == "from-env"


def test_keyword_arguments_take_sections_models_dotted_and_short_names() -> None:
    config = load_config(
        env={},
        model="m",
        executor="mp",
        attention="torch",
        scheduler=SchedulerConfig(queue="priority"),
        max_num_seqs=4,
        tensor_parallel_size=2,
        block_size=8,
        **{"kv_cache.swap_space": "1KiB"},
    )
    assert config.executor.name == "mp"
    assert config.executor.tensor_parallel_size == 2
    assert config.attention.backend == "torch"
    assert (config.scheduler.queue, config.scheduler.max_num_seqs) == ("priority", 4)
    assert (config.kv_cache.block_size, config.kv_cache.swap_space) == (8, 1024)


def test_a_section_model_sets_only_what_was_set_in_it() -> None:
    draft = load_draft(env={"PEGBOARD_SCHEDULER__MAX_NUM_SEQS": "9"}, model="m", scheduler=SchedulerConfig(queue="priority"))
    assert draft.get("scheduler.max_num_seqs") == 9
    assert draft.is_set("scheduler.queue")
    assert not draft.is_set("scheduler.strict")


def test_of_two_options_the_later_one_counts_and_both_are_kept() -> None:
    draft = load_draft(env={}, model="m", cli={"--max-num-seqs": "4", "--set scheduler.max_num_seqs": "5"})
    assert draft.build().scheduler.max_num_seqs == 5
    assert [str(a.origin) for a in draft.provenance(FIELD).overridden] == ["option --max-num-seqs", "default"]


def test_the_draft_can_be_set_by_a_script() -> None:
    draft = load_draft(env={}, model="m", max_num_seqs=4)
    draft.set(FIELD, 6, by="my script")
    assert draft.build().scheduler.max_num_seqs == 6
    assert str(draft.provenance(FIELD)) == "my script"
    assert draft.get("scheduler")["max_num_seqs"] == 6
