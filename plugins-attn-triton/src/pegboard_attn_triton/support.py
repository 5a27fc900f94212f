"""Why a query cannot be served: what all backends of this package need, reason by reason."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pegboard.contracts.attention import AttentionQuery
from pegboard_attn_triton import device

FLOAT8 = "float8_e4m3fn"
LEAST_CAPABILITY = (8, 0)
LEAST_FLOAT8 = (8, 9)


def kernel_problems(query: AttentionQuery) -> list[str | None]:
    """What keeps this package's own kernels from running: triton, the device and its driver."""
    kind = query.device.split(":")[0]
    problems = [device.triton_problem()]
    if kind == "cpu":
        if not device.interpreting():
            problems.append("on a processor the kernels only run interpreted, for tests (TRITON_INTERPRET=1)")
    elif kind == "cuda":
        problems += [device.driver_problem(), capability_problem(query)]
    else:
        problems.append(f"device {query.device!r} is none of cuda, cpu")
    return problems


def capability_problem(query: AttentionQuery, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why the CUDA device is too old, or None. An 8-bit floating point cache needs a younger one than others."""
    found = device.capability()
    if found is None:
        return "no CUDA device is visible"
    if found < least:
        return f"compute capability {dotted(found)} is below {dotted(least)}"
    if query.kv_dtype == FLOAT8 and found < LEAST_FLOAT8:
        return f"a {FLOAT8} cache needs compute capability {dotted(LEAST_FLOAT8)}, and the device has {dotted(found)}"
    return None


def shape_problems(query: AttentionQuery, *, most_head_size: int = 256, multiple: int = 8) -> list[str | None]:
    """Heads that do not divide, and head sizes out of range."""
    size = query.head_size
    divides = query.num_kv_heads > 0 and query.num_heads > 0 and query.num_heads % query.num_kv_heads == 0
    return [
        None if divides else f"{query.num_heads} heads do not divide into {query.num_kv_heads} key heads",
        None if 0 < size <= most_head_size else f"head size {size} is not in 1 … {most_head_size}",
        None if size % multiple == 0 else f"head size {size} is not a multiple of {multiple}",
        None if query.block_size > 0 else f"block size {query.block_size} is not positive",
    ]


def one_of(what: str, value: str, known: tuple[str, ...]) -> str | None:
    """A reason where ``value`` is not known."""
    return None if value in known else f"{what} {value!r} is none of {', '.join(known)}"


def library_problem(distribution: str, least: tuple[int, int], hint: str) -> str | None:
    """Why a library cannot be used: it is not installed, or too old."""
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed ({hint})"
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in installed.split(".")[:2])
    return None if numbers >= least else f"{distribution} {installed} is older than {dotted(least)}"


def dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
