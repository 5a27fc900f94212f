"""Single values and the models themselves."""

import json
import pickle

import pytest
from pydantic import ValidationError

from pegboard.config import EngineConfig, ExecutorConfig, KVCacheSettings, PluginsConfig, SchedulerConfig, parse_bytes
from pegboard.config.fields import FieldTree
from pegboard.config.models import PLUGINS_KEYS
from pegboard.plugins.parts import NAMED_PARTS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("4GiB", 4 * 1024**3),
        ("512 MB", 512 * 1024**2),
        ("1.5G", 1610612736),
        (" 2kib ", 2048),
        ("1T", 1024**4),
        ("3b", 3),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert KVCacheSettings(swap_space=text).swap_space == size


@pytest.mark.parametrize("bad", ["4 GiBs", "", "-1", "1e3", "GiB", "9" * 400, -1, True, 1.5, None])
def test_bad_sizes(bad: object) -> None:
    with pytest.raises(ValidationError):
        KVCacheSettings(swap_space=bad)


def test_other_values_pass_parse_bytes_unchanged() -> None:
    assert parse_bytes(7) == 7
    assert parse_bytes(None) is None


@pytest.mark.parametrize("bad", [0, -1, True, 2**31, "x", 1.5, None])
def test_bad_counts(bad: object) -> None:
    with pytest.raises(ValidationError):
        SchedulerConfig(max_num_seqs=bad)


@pytest.mark.parametrize("bad", [0, -1.0, True, float("inf"), float("nan"), "soon"])
def test_bad_seconds(bad: object) -> None:
    with pytest.raises(ValidationError):
        ExecutorConfig(step_timeout=bad)


@pytest.mark.parametrize(
    "bad",
    [{"model": ""}, {"model": None}, {"max_model_len": 1}, {"dtype": "foo"}, {"seed": -1}, {"typo": 1}, {"device": ""}],
)
def test_bad_engine_fields(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig(**{"model": "m", **bad})


def test_configs_are_frozen_comparable_hashable_and_picklable() -> None:
    config = EngineConfig(model="m", scheduler={"max_num_seqs": 3}, plugins={"block": ["a"], "mine": {"x": [1, {"y": None}]}})
    assert config == EngineConfig(model="m", scheduler=SchedulerConfig(max_num_seqs=3), plugins=config.plugins)
    assert config != EngineConfig(model="m")
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    with pytest.raises(ValidationError):
        config.model = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.scheduler.max_num_seqs = 4  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.plugins.strict = True  # type: ignore[misc]


def test_json_round_trip() -> None:
    config = EngineConfig(
        model="m",
        kv_cache={"swap_space": "1GiB", "memory": "2GiB"},
        observability={"stat_loggers": ["log"]},
        plugins={"allow": [], "mine": {"x": 1}},
    )
    assert EngineConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


def test_plugin_section_is_read_back_typed() -> None:
    plugins = PluginsConfig.model_validate({"mine": {"swap_space": "1KiB"}})
    assert plugins.sections == {"mine": {"swap_space": "1KiB"}}
    assert plugins.section("mine", KVCacheSettings).swap_space == 1024
    assert plugins.section("absent", KVCacheSettings) == KVCacheSettings()


def test_core_keys_of_the_plugins_section() -> None:
    assert {"enabled", "required", "allow", "block", "strict"} == PLUGINS_KEYS


def test_every_field_has_a_description() -> None:
    assert [leaf.path for leaf in FieldTree().leaves() if not leaf.description] == []


def test_fields_that_name_parts_are_those_that_the_composition_reads() -> None:
    marked = {leaf.path: leaf.part.kind for leaf in FieldTree().leaves() if leaf.part}
    assert marked == dict(NAMED_PARTS)
