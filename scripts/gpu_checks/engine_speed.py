"""Tokens per second of whole engines, with and without graphs, beside transformers; and that graphs change no token."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_checks.report import Check

NEEDED = (
    "cloudpickle",
    "msgspec",
    "packaging",
    "pluggy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "tqdm",
    "transformers",
    "yaml",
)
PLUGINS = {
    "pegboard-plugins": {"standard": "pegboard_plugins.plugin"},
    "pegboard-attn-triton": {"attn_triton": "pegboard_attn_triton.plugin"},
}
"""Distributions and their entry points, for a checkout that is not installed."""


@dataclass(frozen=True)
class Setup:
    """What is measured. The defaults are the sizes of Llama 3.2 1B."""

    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128256
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    tokens: int = 128
    peer_caches: tuple[str, ...] = ("dynamic", "static")
    """Of transformers."""
    compiled: bool = True
    """Also with torch.compile."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further fields of the engines' configuration."""


def run(device: torch.device) -> Iterator[Check]:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        yield Check("packages", False, f"whole engines also need {', '.join(missing)}: pip install -r requirements-dev.txt")
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        try:
            announce_plugins(Path(folder))
            yield from same_tokens(Path(folder))
            yield from speeds(Path(folder), device, Setup())
        finally:
            sys.path.remove(folder)


def announce_plugins(folder: Path) -> None:
    """The engine finds its parts by the metadata of what is installed: write it for what is only on the path."""
    from pegboard.testing.distributions import write_distribution

    for name, points in PLUGINS.items():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            write_distribution(folder, name, entry_points=points)


def same_tokens(folder: Path, rows: int = 24, **settings: Any) -> Iterator[Check]:
    """A small float32 model whose greedy choices are clear. More requests than the ``rows`` that run at once, of different
    lengths, so that steps of all sizes come."""
    from pegboard.testing.checkpoints import make_checkpoint

    model = make_checkpoint(folder / "tiny", num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2)
    jobs = [(prompt_of(1000, 3 + 7 * i % 90, i), 16 + 5 * i % 40) for i in range(2 * rows)]
    found = {}
    for eager in (True, False):
        options = {"dtype": "float32", "scheduler": {"max_num_seqs": rows}, "kv_cache": {"num_blocks": 1000}, **settings}
        with closing(Engine(model, eager, options)) as engine:
            found[eager], report = engine.generate(jobs)[0], engine.report()
    if not report["sizes"]:
        yield Check("graphs are captured", False, "; ".join(report["off"]))
        return
    yield Check(
        "graphs are captured", True, f"{len(report['sizes'])} sizes, {report['seconds']:.1f} s, {mib(report['num_bytes'])}"
    )
    differing = sum(a != b for a, b in zip(found[True], found[False], strict=True))
    yield Check("graphs give the eager tokens, float32", not differing, f"{differing} of {len(jobs)} requests differ")


def speeds(folder: Path, device: torch.device, setup: Setup) -> Iterator[Check]:
    """Tokens generated per second, prompts included in the time: Pegboard eager and with graphs, then transformers; Pegboard with
    graphs of compiled code comes last, because compiling takes longest."""
    model = write_config(folder / "model", setup)
    eager: dict[int, float] = {}
    yield from mode_speeds(model, "eager", setup, eager)
    yield from mode_speeds(model, "graphs", setup, eager)
    yield from peer_speeds(model, device, setup, eager)
    if setup.compiled:
        yield from mode_speeds(model, "compiled", setup, eager)


def mode_speeds(model: Path, mode: str, setup: Setup, eager: dict[int, float]) -> Iterator[Check]:
    """``eager``: rates by batch, which that mode fills in."""
    options = {
        "dtype": setup.dtype,
        "load_format": "dummy",
        "max_model_len": setup.prompt + setup.tokens,
        "scheduler": {"max_num_seqs": max(setup.batches), "max_num_batched_tokens": 4096},
        "kv_cache": {"memory_fraction": 0.5},
        **setup.settings,
    }
    with closing(Engine(model, mode == "eager", options, mode == "compiled")) as engine:
        if mode == "graphs":
            yield memory_check(engine)
        for batch in setup.batches:
            rate = engine.rate(setup, batch)
            detail = f"{rate:8.0f} tokens/s" + ("" if mode == "eager" else f", {rate / eager[batch]:.2f} x eager")
            eager.setdefault(batch, rate)
            yield Check(f"pegboard {mode}, batch {batch}", rate > 0, detail, {"tokens_per_s": rate})


def memory_check(engine: Engine) -> Check:
    """What graphs were expected to take, when the KV cache was sized, beside what they have taken."""
    taken, expected = engine.report()["num_bytes"], engine.measured()
    return Check(
        "memory of graphs", taken <= 1.25 * expected + (64 << 20), f"{mib(taken)}, expected {mib(expected)}", {"bytes": taken}
    )


class Engine:
    def __init__(self, model: Path, eager: bool, options: dict[str, Any], compiled: bool = False) -> None:
        from pegboard import LLM

        self.llm = LLM(str(model), compilation={"enforce_eager": eager, "torch_compile": compiled}, **options)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.llm.collective_rpc("graph_report")[0]
        return found

    def measured(self) -> int:
        return int(self.llm.collective_rpc(_measured)[0])

    def generate(self, jobs: list[tuple[list[int], int]]) -> tuple[list[list[int]], float]:
        """Tokens of each (prompt, number of tokens), and the seconds that all took."""
        from pegboard import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in jobs]
        begin = time.perf_counter()
        outputs = self.llm.generate([prompt for prompt, _ in jobs], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - begin

    def rate(self, setup: Setup, batch: int) -> float:
        """The better of two runs, on prompts that no run before has had."""
        rates = []
        for turn in range(2):
            jobs = [
                (prompt_of(setup.vocab_size, setup.prompt, 1000 * turn + 100 * batch + i), setup.tokens) for i in range(batch)
            ]
            tokens, seconds = self.generate(jobs)
            rates.append(sum(map(len, tokens)) / seconds)
        return max(rates)

    def close(self) -> None:
        self.llm.shutdown()
        free_memory()


def _measured(worker: Any) -> int:
    """Measured anew, beside the graphs that are there. Called in the worker."""
    from pegboard_plugins.graphs.runner import DecodeGraphRunner

    with torch.inference_mode():
        return DecodeGraphRunner(worker.config, worker.platform).measure(worker._graph_target(worker._scratch_caches()))


def peer_speeds(model: Path, device: torch.device, setup: Setup, ours: dict[int, float]) -> Iterator[Check]:
    """transformers on the same sizes, with scaled dot product attention, one batch of equally long prompts at a time."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype)).eval()
    for kind in setup.peer_caches:
        for batch in setup.batches:
            ids = torch.tensor([prompt_of(setup.vocab_size, setup.prompt, i) for i in range(batch)], device=device)
            options: dict[str, Any] = {"max_new_tokens": setup.tokens, "min_new_tokens": setup.tokens, "do_sample": False}
            if kind == "static":
                options |= {"cache_implementation": "static", "disable_compile": True}
            seconds = []
            for _ in range(2):
                begin = time.perf_counter()
                with torch.inference_mode():
                    peer.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
                synchronize(device)
                seconds.append(time.perf_counter() - begin)
            rate = batch * setup.tokens / min(seconds)
            detail = f"{rate:8.0f} tokens/s, {rate / ours[batch]:.2f} x pegboard eager"
            yield Check(f"transformers {kind} cache, batch {batch}", rate > 0, detail, {"tokens_per_s": rate})
    del peer
    free_memory()


def write_config(folder: Path, setup: Setup) -> Path:
    """config.json and a tokenizer; weights are made up."""
    from pegboard.testing.tiny_tokenizer import write_tokenizer

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": setup.vocab_size,
        "hidden_size": setup.hidden_size,
        "intermediate_size": setup.intermediate_size,
        "num_hidden_layers": setup.num_layers,
        "num_attention_heads": setup.num_heads,
        "num_key_value_heads": setup.num_kv_heads,
        "head_dim": setup.hidden_size // setup.num_heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": setup.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, size=1000)
    return folder


def prompt_of(vocab_size: int, length: int, seed: int) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(4, min(vocab_size, 1000), (length,), generator=made).tolist()


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
