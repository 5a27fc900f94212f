"""Compiled forwards: the tokens of the others, one code for all layers, nothing compiled while serving, and errors that help."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pegboard import LLM, SamplingParams
from pegboard.config import ConfigError
from pegboard.plugins import hookimpl
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.graph_session import TwoGroupModel
from pegboard.testing.thread_executor import THREADS, ThreadRanks
from pegboard_plugins.compilation import folder as folder_module
from pegboard_plugins.compilation import forward

LAYERS = 10
"""More than the variants of one function that torch's compiler is willing to keep: layers must share their code."""


class Key:
    def __init__(self, key: str) -> None:
        self.key = key

    @hookimpl
    def compile_cache_key(self, config: Any) -> str:
        return self.key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compiled"), num_layers=LAYERS)


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(forward._FOLDER, raising=False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler has found runs as it is: quick, and all the rest is the same."""
    monkeypatch.setattr(forward, "_BACKEND", "eager")


@pytest.fixture
def open_llm(folder: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_(model: Path = folder, compiled: bool = True, tp: int = 1, **options: Any) -> LLM:
        plugins, executor = options.pop("plugins", {}), {"num_threads": 1}
        if tp > 1:
            plugins, executor = {"threads": ThreadRanks(), **plugins}, {**THREADS, "tensor_parallel_size": tp}
        fields = {"max_model_len": 128, "scheduler": {"max_num_seqs": 6}, "kv_cache": {"num_blocks": 100}, **options}
        compilation = {"torch_compile": compiled}
        opened.append(LLM(str(model), dtype="float32", executor=executor, plugins=plugins, compilation=compilation, **fields))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


def answers(llm: LLM) -> list[list[int]]:
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 1000) for _ in range(length)] for length in (3, 40, 1, 17, 8, 2, 60, 5)]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True) for i in range(len(prompts))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_nothing_is_compiled_while_serving(open_llm: Any) -> None:
    wanted = answers(open_llm(compiled=False))
    assert not counters["stats"]
    llm = open_llm()
    compiled = counters["stats"]["unique_graphs"]
    assert 0 < compiled < 2 * LAYERS, "layers share their code"
    assert answers(llm) == wanted
    assert counters["stats"]["unique_graphs"] == compiled
    llm.collective_rpc("sleep", (2,))
    llm.collective_rpc("wake_up", (None,))
    llm.reset_prefix_cache()
    assert answers(llm) == wanted
    assert counters["stats"]["unique_graphs"] == compiled, "the model made on waking uses the code that is there"


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_ranks_compile_what_is_theirs(open_llm: Any) -> None:
    wanted = answers(open_llm(compiled=False))
    llm = open_llm(tp=2)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled
    assert answers(llm) == wanted
    assert counters["stats"]["unique_graphs"] == compiled


class Doubled(TwoGroupModel):
    """One small function, for the real compiler."""

    def forward(self, input_ids: Any, positions: Any, context: Any = None, intermediate: Any = None) -> Any:
        return (self.embedding[input_ids] * 2 + positions[:, None]).tanh()


@pytest.mark.slow
def test_code_is_kept_in_the_folder_and_found_again(tmp_path: Path) -> None:
    device, ids = torch.device("cpu"), torch.arange(5)
    wanted = Doubled(device).forward(ids, ids)
    for turn in range(2):
        model = Doubled(device)
        forward.compile_forward(model, tmp_path, device)
        torch.testing.assert_close(model.forward(ids, ids), wanted)
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (1 - turn, turn)
        assert any(tmp_path.rglob("*.so"))
        torch._dynamo.reset()
        counters.clear()


@pytest.mark.usefixtures("uncompiled")
def test_folders_follow_what_code_depends_on(tmp_path: Path, open_llm: Any, folder: Path) -> None:
    root = tmp_path / "cache" / "pegboard" / "compiled"

    def folders_after(**options: Any) -> set[Path]:
        open_llm(**{"model": tiny, **options})
        return set(root.iterdir())

    tiny = make_checkpoint(tmp_path / "tiny", num_layers=1)
    first = folders_after()
    assert len(first) == 1
    assert folders_after() == first
    with_plugin = folders_after(plugins={"acme": Key("kernels 1")})
    assert len(with_plugin) == 2
    assert folders_after(plugins={"acme": Key("kernels 1")}) == with_plugin
    assert len(folders_after(plugins={"acme": Key("kernels 2")})) == 3
    notes = [(each / "key.json").read_text() for each in root.iterdir()]
    assert sum("kernels 1" in note for note in notes) == 1
    assert all(torch.__version__ in note and '"float32"' in note for note in notes)


def test_a_folder_that_the_user_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forward._FOLDER, "/mine")
    with forward._code_in(tmp_path):
        assert os.environ[forward._FOLDER] == "/mine"
    for before in (None, default_cache_dir()):
        monkeypatch.delenv(forward._FOLDER)
        if before is not None:
            monkeypatch.setenv(forward._FOLDER, before)
        with forward._code_in(tmp_path):
            assert os.environ[forward._FOLDER] == str(tmp_path)
        assert os.environ.get(forward._FOLDER) == before
        monkeypatch.setenv(forward._FOLDER, "")


def test_notes_are_whole(tmp_path: Path) -> None:
    found = {folder_module.code_folder({"torch": "1", "rank": i % 2}) for i in range(4)}
    assert len(found) == 2
    assert all([file.name for file in each.iterdir()] == ["key.json"] for each in found)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(forward.CompilationError, match=r"cannot be kept in .*file.*XDG_CACHE_HOME; .*torch_compile=false"):
        folder_module.code_folder({})
    monkeypatch.setenv(forward._FOLDER, str(tmp_path / "file" / "mine"))
    with pytest.raises(forward.CompilationError, match=r"cannot be kept in .*file/mine.*TORCHINDUCTOR_CACHE_DIR.*torch_compile="):
        forward.compile_forward(TwoGroupModel(torch.device("cpu")), tmp_path, torch.device("cpu"))


def test_a_compiler_is_needed(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(
        Exception, match=r"needs a C\+\+ compiler, and there is none: install g\+\+ .*torch_compile=false does without"
    ):
        open_llm()


def test_a_failure_names_the_remedy(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such instruction")

    monkeypatch.setattr(forward, "_BACKEND", broken)
    with pytest.raises(
        Exception, match=r"LlamaForCausalLM could not be compiled: .*compilation.torch_compile=false does without"
    ):
        open_llm()


def test_a_model_has_to_say_that_it_can_be_compiled(open_llm: Any, tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_checkpoint(tmp_path / "model", config_overrides={"rope_parameters": dynamic, "max_position_embeddings": 64})
    with pytest.raises(Exception, match="LlamaForCausalLM does not say that its forward can be compiled"):
        open_llm(model)


def test_eager_and_compiled_contradict_each_other() -> None:
    with pytest.raises(
        ConfigError, match=r"compilation.torch_compile: nothing is compiled while compilation.enforce_eager is true"
    ):
        LLM("smollm2", compilation={"torch_compile": True, "enforce_eager": True})


@pytest.mark.usefixtures("uncompiled")
def test_too_many_variants_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_VARIANTS", 1)
    device, ids = torch.device("cpu"), torch.arange(5)
    model = Doubled(device)
    forward.compile_forward(model, tmp_path, device)
    model.forward(ids, ids)
    with pytest.raises(forward.CompilationError, match=r"Doubled could not be compiled: .*torch_compile=false does without"):
        model.forward(ids, ids.float())
