"""Config files: TOML and YAML, and what is wrong with them."""

from pathlib import Path

import pytest

from pegboard.config import ConfigError, load_config, load_draft

TOML = """
model = "m"
executor = "mp"
[scheduler]
queue = "priority"
max_num_seqs = 8
[kv_cache]
swap_space = "4GiB"
[plugins]
block = ["x"]
[plugins.mine]
depth = 2
"""
YAML = """
model: m
executor: mp
scheduler: {queue: priority, max_num_seqs: 8}
kv_cache:
  swap_space: 4GiB
plugins:
  block: [x]
  mine:
    depth: 2
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_yaml_mean_the_same(tmp_path: Path) -> None:
    configs = [
        load_config(env={}, file=write(tmp_path / "c.toml", TOML)),
        load_config(env={}, file=write(tmp_path / "c.yaml", YAML)),
        load_config(env={}, file=str(write(tmp_path / "c.YML", YAML))),
    ]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].scheduler.max_num_seqs == 8
    assert configs[0].plugins.sections == {"mine": {"depth": 2}}


@pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML)])
def test_values_remember_file_and_key(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    draft = load_draft(env={}, file=path)
    assert str(draft.provenance("kv_cache.swap_space")) == f"file {path}, key kv_cache.swap_space"
    assert str(draft.provenance("executor.name")) == f"file {path}, key executor"


def test_pegboard_config_names_the_file_unless_one_is_given(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", 'model = "a"')
    second = write(tmp_path / "b.toml", 'model = "b"')
    assert load_config(env={"PEGBOARD_CONFIG": str(first)}).model == "a"
    assert load_config(env={"PEGBOARD_CONFIG": str(first)}, file=second).model == "b"


@pytest.mark.parametrize(("name", "text"), [("c.toml", ""), ("c.yaml", ""), ("c.yaml", "# nothing\n"), ("c.toml", "\ufeff")])
def test_an_empty_file_sets_nothing(tmp_path: Path, name: str, text: str) -> None:
    assert load_config(env={}, file=write(tmp_path / name, text), model="m").model == "m"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("c.json", b"{}", ".toml, .yaml, .yml"),
        ("c.toml", b"model = ", "not valid TOML"),
        ("c.toml", b"model = 'a'\nmodel = 'b'", "not valid TOML"),
        ("c.toml", b"\xff\xfe", "cannot be read"),
        ("c.yaml", b"a: [", "not valid YAML"),
        ("c.yaml", b"model: a\nmodel: b", "'model' occurs twice"),
        ("c.yaml", b"scheduler: {queue: a, queue: b}", "'queue' occurs twice"),
        ("c.yaml", b"1: a", "key 1 is not text"),
        ("c.yaml", b"[a, b]", "not a list"),
        ("c.yaml", b"just text", "not a str"),
        ("c.yaml", b"!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("absent.toml", None, "does not exist"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, file=path, model="m")
    assert [p.where for p in caught.value.problems] == [str(path)]
    assert told in str(caught.value)


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(env={}, file=folder, model="m")


def test_yaml_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    text = "model: m\nscheduler: &s {queue: priority, max_num_seqs: 2}\n"
    config = load_config(env={}, file=write(tmp_path / "c.yaml", text))
    assert config.scheduler.queue == "priority"
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, file=write(tmp_path / "d.yaml", text + "executor: {<<: *s, name: mp}\n"))
    assert {p.where for p in caught.value.problems} == {"executor.queue", "executor.max_num_seqs"}


def test_an_unreadable_file_does_not_hide_other_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={"PEGBOARD_TYPO": "1"}, file=tmp_path / "no.toml", dtype="foo")
    assert [p.where for p in caught.value.problems] == [str(tmp_path / "no.toml"), "PEGBOARD_TYPO", "dtype", "model"]
