"""From references to sources: folders, files, hub ids, packaged models, and what is said when there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.model_source import ModelNotFound
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.loaders import hub
from pegboard_plugins.loaders.resolve import resolve


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="x", **options)


def test_a_folder_with_safetensors(checkpoint: Path) -> None:
    source = resolve(str(checkpoint), config())
    assert source is not None
    assert (source.ref, source.path) == (str(checkpoint), str(checkpoint))
    assert (source.loader, source.tokenizer, source.tokenizer_path) == ("safetensors", "hf", None)
    assert source.config == json.loads((checkpoint / "config.json").read_text())
    assert source.generation_config == {"eos_token_id": [0, 3]}


def test_a_folder_without_generation_config(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    (tmp_path / "generation_config.json").unlink()
    source = resolve(str(tmp_path))
    assert source is not None
    assert source.generation_config == {}


def test_a_gguf_file_and_a_folder_with_one(gguf_file: Path) -> None:
    for ref in (gguf_file, gguf_file.parent):
        source = resolve(str(ref), config())
        assert source is not None
        assert (source.ref, source.path, source.loader, source.tokenizer) == (str(ref), str(gguf_file), "gguf", "gguf")
        assert source.config["architectures"] == ["LlamaForCausalLM"]
        assert source.generation_config == {"eos_token_id": [0]}


def test_a_gguf_file_of_another_name(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "sha256-0123"
    path.write_bytes(gguf_file.read_bytes())
    source = resolve(str(path))
    assert source is not None
    assert source.loader == "gguf"


def test_two_ggufs_in_a_folder_are_listed_with_how_to_choose(gguf_file: Path, tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        (tmp_path / name).write_bytes(gguf_file.read_bytes())
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF files: a-Q4_0.gguf, b-Q8_0.gguf. Name the one .* = '.*a-Q4_0.gguf'"):
        resolve(str(tmp_path))
    source = resolve(str(tmp_path / "b-Q8_0.gguf"))
    assert source is not None
    assert source.path.endswith("b-Q8_0.gguf")


def test_load_format_chooses_where_a_folder_has_both(checkpoint: Path, gguf_file: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.gguf").write_bytes(gguf_file.read_bytes())
    for load_format, expected in (("auto", "safetensors"), ("safetensors", "safetensors"), ("gguf", "gguf")):
        source = resolve(str(tmp_path), config(load_format=load_format))
        assert source is not None
        assert source.loader == expected


def test_other_load_formats_need_only_the_configuration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    (tmp_path / "model.safetensors").unlink()
    source = resolve(str(tmp_path), config(load_format="dummy"))
    assert source is not None
    assert (source.loader, source.tokenizer) == ("dummy", "hf")


@pytest.mark.parametrize(
    ("files", "load_format", "expected"),
    [
        ({}, "auto", r"no model found; looked for config.json with \*.safetensors, or one \*.gguf file"),
        ({}, "gguf", r"looked for one \*.gguf file"),
        ({}, "safetensors", r"looked for config.json with \*.safetensors"),
        ({"config.json": "{}"}, "auto", "config.json is there, the weights are missing"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "auto", "pytorch_model.bin is a pickle"),
        ({"model.safetensors": "x"}, "auto", "holds safetensors files but no config.json"),
        ({"config.json": "{", "model.safetensors": "x"}, "auto", "config.json: cannot be read as JSON"),
        ({"config.json": "[]", "model.safetensors": "x"}, "auto", "config.json: holds a list, expected an object"),
        (
            {"config.json": "{}", "model.safetensors": "x", "generation_config.json": "3"},
            "auto",
            "generation_config.json: holds a int",
        ),
        ({"model.gguf": "GGUX" + "x" * 50}, "auto", "model.gguf: not a GGUF file: it starts with b'GGUX'"),
        ({"model.gguf": ""}, "auto", "model.gguf: not a GGUF file: 0 bytes"),
    ],
)
def test_unusable_folders_say_why(tmp_path: Path, files: dict[str, str], load_format: str, expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelNotFound, match=expected) as error:
        resolve(str(tmp_path), config(load_format=load_format))
    assert str(tmp_path) in str(error.value)


def test_unusable_files_say_why(checkpoint: Path, gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"give its folder, with config\.json"):
        resolve(str(checkpoint / "model.safetensors"))
    with pytest.raises(ModelNotFound, match="not a GGUF file"):
        resolve(str(checkpoint / "config.json"))
    with pytest.raises(ModelNotFound, match="load_format is safetensors, but this is a single file"):
        resolve(str(gguf_file), config(load_format="safetensors"))
    part = write_gguf(checkpoint, tmp_path / "model-00001-of-00002.gguf", metadata={"split.count": 2})
    with pytest.raises(ModelNotFound, match="one of 2 parts of a split model; join them with"):
        resolve(str(part))
    foreign = write_gguf(checkpoint, tmp_path / "foo.gguf", metadata={"general.architecture": "foo"})
    expected = r"foo.gguf: GGUF architecture 'foo' is not supported \(supported: gemma2, gemma3, llama, qwen2, qwen3\)"
    with pytest.raises(ModelNotFound, match=expected):
        resolve(str(foreign))


@pytest.mark.parametrize("ref", ["./absent", "/absent", "~/absent", "a/b/c", "absent.gguf", "..\\absent"])
def test_paths_to_nothing(ref: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        resolve(ref)


@pytest.mark.parametrize("ref", ["", "  "])
def test_no_reference_at_all(ref: str) -> None:
    with pytest.raises(ModelNotFound, match="no model was named"):
        resolve(ref)


@pytest.mark.parametrize("ref", ["gpt-17", "s3://bucket/model", "ollama:llama3"])
def test_what_only_another_plugin_can_know_is_left_to_it(ref: str) -> None:
    assert resolve(ref, config()) is None


class TestTokenizerOption:
    def test_a_folder(self, checkpoint: Path, gguf_file: Path) -> None:
        for ref in (checkpoint, checkpoint / "tokenizer.json"):
            source = resolve(str(gguf_file), config(tokenizer=str(ref)))
            assert source is not None
            assert (source.loader, source.tokenizer, source.tokenizer_path) == ("gguf", "hf", str(checkpoint))

    def test_a_gguf_file_or_a_folder_with_one(self, checkpoint: Path, gguf_file: Path) -> None:
        for ref in (gguf_file, gguf_file.parent):
            source = resolve(str(checkpoint), config(tokenizer=str(ref)))
            assert source is not None
            assert (source.loader, source.tokenizer, source.tokenizer_path) == ("safetensors", "gguf", str(gguf_file))

    def test_a_packaged_model(self, checkpoint: Path) -> None:
        source = resolve(str(checkpoint), config(tokenizer="smollm2"))
        assert source is not None
        assert source.tokenizer == "gguf"
        assert source.tokenizer_path is not None
        assert source.tokenizer_path.endswith(".gguf")

    def test_nothing(self, checkpoint: Path) -> None:
        with pytest.raises(ModelNotFound, match="tokenizer 'absent': no such folder"):
            resolve(str(checkpoint), config(tokenizer="absent"))
        with pytest.raises(ModelNotFound, match=r"\./absent: no such file or folder"):
            resolve(str(checkpoint), config(tokenizer="./absent"))


class TestHub:
    @pytest.fixture(autouse=True)
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def cached(self, tmp_path: Path, repository: str) -> Path:
        """A snapshot folder as the hub library lays it out."""
        folder = tmp_path / "hub" / ("models--" + repository.replace("/", "--"))
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        return snapshot

    def test_what_is_cached_is_found_offline(self, tmp_path: Path) -> None:
        snapshot = make_checkpoint(self.cached(tmp_path, "org/tiny-model_1.0"), num_layers=1)
        source = resolve("org/tiny-model_1.0", config())
        assert source is not None
        assert (source.ref, source.path, source.loader) == ("org/tiny-model_1.0", str(snapshot), "safetensors")

    def test_a_cached_gguf_file(self, tmp_path: Path, gguf_file: Path) -> None:
        snapshot = self.cached(tmp_path, "org/tiny-GGUF")
        (snapshot / "tiny.Q8_0.gguf").write_bytes(gguf_file.read_bytes())
        source = resolve("org/tiny-GGUF/tiny.Q8_0.gguf", config(tokenizer="org/tiny-GGUF"))
        assert source is not None
        assert (source.loader, source.tokenizer) == ("gguf", "gguf")
        with pytest.raises(ModelNotFound, match=r"has no file 'other\.gguf'"):
            resolve("org/tiny-GGUF/other.gguf")

    def test_a_repository_without_safetensors_says_how_to_name_a_gguf_file(self, tmp_path: Path) -> None:
        self.cached(tmp_path, "org/only-GGUF")
        with pytest.raises(ModelNotFound, match=r"no model found; .* named in full: org/only-GGUF/<file>.gguf"):
            resolve("org/only-GGUF")

    @pytest.mark.parametrize("ref", ["org/absent", "org/absent/model.gguf"])
    def test_what_is_not_cached_says_what_to_do_offline(self, tmp_path: Path, ref: str) -> None:
        with pytest.raises(
            ModelNotFound, match=r"'org/absent' is neither a local .* cache .*hub, and HF_HUB_OFFLINE is set. Download"
        ):
            resolve(ref)

    def test_a_hub_that_cannot_be_reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants, errors

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        self.failing(monkeypatch, errors.LocalEntryNotFoundError("no connection"))
        with pytest.raises(ModelNotFound, match="the Hugging Face hub cannot be reached"):
            resolve("org/model")

    def test_other_failures_of_the_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing(monkeypatch, OSError("disk full"))
        with pytest.raises(ModelNotFound, match="'org/model' could not be fetched from the Hugging Face hub: OSError: disk full"):
            resolve("org/model")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("GatedRepoError", "needs access: ask for it"), ("RepositoryNotFoundError", "nor a model on the Hugging Face hub")],
    )
    def test_answers_of_the_hub(self, monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
        from huggingface_hub import errors

        kind = getattr(errors, name)
        self.failing(monkeypatch, kind.__new__(kind))
        with pytest.raises(ModelNotFound, match=expected):
            resolve("org/model")

    def failing(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        import huggingface_hub

        def download(*args: object, **options: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    @pytest.mark.parametrize(
        ("ref", "expected"),
        [("org/name", True), ("Org-1/na.me_2", True), ("name", False), ("a/b/c", False), ("./name", False), ("org/na me", False)],
    )
    def test_hub_ids(self, ref: str, expected: bool) -> None:
        assert hub.is_hub_id(ref) is expected
