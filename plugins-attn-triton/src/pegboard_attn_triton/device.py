"""What can be known of the device and its driver without opening it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

LEAST_TRITON = (3, 4)


def interpreting() -> bool:
    """Whether triton interprets kernels on the processor instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def capability() -> tuple[int, int] | None:
    """Compute capability of the current device if torch has opened it; else the least of all devices, as the driver's management
    library tells. None where there is none."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_capability()
    found = _capabilities()
    return min(found) if found else None


def triton_problem() -> str | None:
    """Why triton cannot be used, or None."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return "triton is not installed (pip install triton)"
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < LEAST_TRITON:
        return f"triton {installed} is older than {'.'.join(map(str, LEAST_TRITON))}"
    return None


def driver_problem() -> str | None:
    """Why kernels cannot be launched on a CUDA device here, or None: triton needs the driver, and a C compiler to reach it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "NVIDIA's driver is not installed (libcuda.so.1 cannot be loaded)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler: install gcc or clang, or name one in the environment variable CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"triton needs Python's headers, and {header} is missing (a package such as python3-dev has it)"
    return None


def processors(device: torch.device) -> int:
    """Multiprocessors of an opened device; a small number where kernels are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 16


def _capabilities() -> list[tuple[int, int]]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                continue
            if not nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
                found.append((major.value, minor.value))
        return found
    finally:
        nvml.nvmlShutdown()
