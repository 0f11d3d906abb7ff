"""CudaModule: the kernels of one CUDA source file on one device. Imported only where CUDA is.

Owns compilation by NVRTC and launches. Knows no kernel.

    source, macros ──NVRTC──► binary ──► CudaModule, loaded on a device ──► launch on torch's stream
                     or the file of an earlier start: binary_cache.py

NVRTC and its bindings come with torch: no compiler has to be installed.
Sources include no other file, so a source and its options determine the binary.
Always true: a launch does not wait for the device, and a CUDA graph may contain it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from forge.models.hf.binary_cache import cache_folder, load_or_build


class CudaModule:
    """Kernels of a compiled source file, loaded on a device.

    binary         result of `compile_source` for this device
    shared_bytes   dynamic shared memory of each kernel, by its name: the most that a launch has
    """

    def __init__(
        self, binary: bytes, shared_bytes: Mapping[str, int], device: torch.device
    ) -> None:
        self._device = with_index(device)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._functions = {}
        # torch's context, which is not current in a thread that only allocated.
        self._context = check_result(driver.cuDevicePrimaryCtxRetain(self._device.index))
        with self._current_context():
            module = check_result(driver.cuModuleLoadData(binary))
            for name, size in shared_bytes.items():
                function = check_result(driver.cuModuleGetFunction(module, name.encode()))
                check_result(driver.cuFuncSetAttribute(function, attribute, size))
                self._functions[name] = function

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: Sequence[Tensor | int | float | None],
        *,
        pdl: bool = False,
    ) -> None:
        """Launch a kernel on torch's current stream.

        grid        CTAs in x and y
        arguments   a tensor is passed as its address, None as a null pointer, int as long long,
                    float as float
        pdl         launch while the kernel before still runs (programmatic dependent launch)
        """
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        config.attrs = [_pdl_attribute()] if pdl else []
        config.numAttrs = len(config.attrs)
        values, types = zip(*map(_kernel_argument, arguments), strict=True)
        with self._current_context():
            check_result(driver.cuLaunchKernelEx(config, self._functions[name], (values, types), 0))

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        """Make the device's context current in this thread, and afterwards the one before."""
        check_result(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            check_result(driver.cuCtxPopCurrent())


@cache
def _pdl_attribute() -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def compile_source(
    source: Path, macros: Sequence[str], device: torch.device, *, options: Sequence[str] = ()
) -> bytes:
    """Return the source file compiled for the device. Raise RuntimeError where it does not compile.

    Cached, also on disk. Other threads go on while it compiles.

    macros    "NAME" or "NAME=VALUE"
    options   further options of NVRTC
    """
    major, minor = torch.cuda.get_device_capability(device)
    # `a` admits instructions of this architecture alone, such as those of Hopper's tensor cores.
    architecture = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    return _compile(source, (*options, *(f"-D{each}" for each in macros)), architecture)


@cache
def _compile(source: Path, options: tuple[str, ...], architecture: str) -> bytes:
    flags = [each.encode() for each in (f"--gpu-architecture={architecture}", *options)]
    text, version = source.read_bytes(), nvrtc_version().encode()
    key = (text, source.name.encode(), version, *flags)
    return load_or_build(cache_folder(), key, partial(_compile_text, source.name, text, flags))


def nvrtc_version() -> str:
    """Return the version of NVRTC: the library's own, and that of CUDA that torch is built with."""
    major, minor = check_result(nvrtc.nvrtcVersion())
    return f"{major}.{minor} torch {torch.__version__}"


def _compile_text(name: str, text: bytes, flags: Sequence[bytes]) -> bytes:
    program = check_result(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error):
        log = b" " * check_result(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile: {log.decode()}")
    binary: bytes = b" " * check_result(nvrtc.nvrtcGetCUBINSize(program))
    check_result(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def _kernel_argument(argument: Tensor | int | float | None) -> tuple[int | float, Any]:
    """Return the value and the C type of a kernel's argument."""
    if argument is None:
        return 0, ctypes.c_void_p
    if isinstance(argument, int):
        return argument, ctypes.c_longlong
    if isinstance(argument, float):
        return argument, ctypes.c_float
    return argument.data_ptr(), ctypes.c_void_p


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" is the current one."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def max_shared_bytes(device: torch.device) -> int:
    """Return the most dynamic shared memory that a CTA may have on the device, in bytes."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    size: int = check_result(driver.cuDeviceGetAttribute(attribute, with_index(device).index))
    return size


def check_result(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or of NVRTC returned: nothing, a value or several.

    Raise RuntimeError on an error.
    """
    error, *values = result
    if int(error):
        raise RuntimeError(f"a call of CUDA failed: {error!r}")
    return values[0] if len(values) == 1 else tuple(values) or None
