"""Compile launches for devices that are not there: signatures from arguments, as a launch would make them."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pegboard.contracts.attention import AttentionLayer
from pegboard_attn_triton import launch
from pegboard_attn_triton.launch import Launch
from pegboard_attn_triton.layout import kv_cache_shape
from pegboard_attn_triton.steps import StepMetadata
from pegboard_attn_triton.tuning.config import KernelConfig, Problem

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNED = [["tt.divisibility", 16]]


def compile_launch(made: Launch, capability: tuple[int, int]) -> Any:
    """The compiled kernel. Tensors are taken to be aligned; numbers are specialised as triton does it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    assert set(made.arguments) == set(made.kernel.arg_names), "every argument is given, and no other"
    for index, parameter in enumerate(made.kernel.params):
        value = made.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[index,] = ALIGNED
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[index,] = ALIGNED
    source = ASTSource(fn=made.kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options=made.options)


class MetaStep:
    """The tensors of a step, without memory."""

    def __init__(self, problem: Problem, num_kv_heads: int = 4, splits: int = 8, **layer: Any) -> None:
        tokens, rows = 48, 3
        dtype, size = getattr(torch, problem.dtype), problem.head_size
        heads = num_kv_heads * problem.group
        fused = empty(tokens, heads + 2 * num_kv_heads, size, dtype=dtype)
        self.query, self.key, self.value = fused.split([heads, num_kv_heads, num_kv_heads], 1)
        self.out = empty(tokens, heads, size, dtype=dtype)
        self.cache = empty(*kv_cache_shape(50, problem.block_size, num_kv_heads, size), dtype=getattr(torch, problem.kv_dtype))
        self.layer = AttentionLayer("layer", heads, num_kv_heads, size, size**-0.5, **layer)
        self.metadata = StepMetadata(
            slots=empty(tokens, dtype=torch.int64),
            block_table=empty(rows, 64, dtype=torch.int32),
            seq_lens=empty(rows, dtype=torch.int32),
            query_start=empty(rows + 1, dtype=torch.int32),
            decode_rows=empty(rows, dtype=torch.int32),
            tile_rows=empty(rows, dtype=torch.int32),
            tile_starts=empty(rows, dtype=torch.int32),
            num_splits=splits,
            block_m=128,
        )
        self.problem = problem

    def store(self) -> Launch:
        return launch.store(self.layer, self.key, self.value, self.cache, self.metadata.slots)

    def attention(self, config: KernelConfig) -> list[Launch]:
        """The launches of the problem's kernel."""
        upcast = self.problem.dtype == "float32"
        if self.problem.kernel == "decode":
            return launch.decode(self.layer, self.query, self.cache, self.metadata, self.out, config, upcast)
        self.metadata.block_m = config.block_m
        return [launch.prefill(self.layer, self.query, self.cache, self.metadata, self.out, config, upcast)]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
