"""Platforms: the processor, and NVIDIA devices. Which one there is can be told without torch, which only ranks need."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

from pegboard.contracts.platform import DeviceGraphs, Platform
from pegboard_plugins.worker.memory import host_memory, resident
from pegboard_plugins.worker.threads import usable_cores

if TYPE_CHECKING:
    import torch


class CpuPlatform(Platform):
    """A "device" is a core: each worker needs at least one."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def is_available(cls) -> bool:
        return True

    def device_count(self) -> int:
        return usable_cores()

    def set_device(self, local_rank: int, num_threads: int | None) -> torch.device:
        import torch

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        return resident(), host_memory()[1]

    def preferred_dtype(self, stated: str | None) -> str:
        """float16 becomes float32, which holds it exactly: few processors multiply float16, and its range overflows.

        A checkpoint that states nothing (quantised files) is computed in bfloat16 where the processor multiplies that,
        at half the memory traffic, and in float32 elsewhere.
        """
        if stated == "float16":
            return "float32"
        return stated or ("bfloat16" if multiplies_bfloat16() else "float32")

    def synchronize(self) -> None: ...


class CudaPlatform(Platform):
    name = "cuda"
    device_type = "cuda"

    def __init__(self) -> None:
        self._device: torch.device | None = None

    @classmethod
    def is_available(cls) -> bool:
        if not _has_driver():
            return False
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def set_device(self, local_rank: int, num_threads: int | None) -> torch.device:
        import torch

        count = self.device_count()
        if local_rank >= count:
            raise RuntimeError(
                f"local rank {local_rank} needs a device of its own, but {count} are visible; lower "
                f"executor.tensor_parallel_size x executor.pipeline_parallel_size, or make more visible (CUDA_VISIBLE_DEVICES)"
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self._device)
        return self._device

    def memory(self) -> tuple[int, int]:
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total

    def preferred_dtype(self, stated: str | None) -> str:
        """As stated, but bfloat16 becomes float16 on devices without it (compute capability below 8)."""
        import torch

        wanted = stated or "bfloat16"
        if wanted == "bfloat16" and torch.cuda.get_device_capability(self._device)[0] < 8:
            return "float16"
        return wanted

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def make_graphs(self) -> DeviceGraphs:
        from pegboard_plugins.graphs.cuda import CudaGraphs

        assert self._device is not None, "the device comes before its graphs"
        return CudaGraphs(self._device)


def _has_driver() -> bool:
    """Whether NVIDIA's driver is installed; loading its library opens no device."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 products; without them torch emulates, slower than float32."""
    import torch

    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        ask = getattr(torch.cpu, name, None)
        if ask is not None and ask():
            return True
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capability.get("bf16") or capability.get("avx512_bf16") or capability.get("amx_bf16"))
