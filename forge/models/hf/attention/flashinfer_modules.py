"""FlashInfer's compiled modules: which ones a model needs, and whether each is ready to load.

Owns the list of modules and the search for them. Compiles nothing: `nvcc` needs one to two minutes
for a model's modules, and a start must not wait for that.

    layers ──► required_modules ──► find_obstacle ──► None       FlashInfer serves
                                          └── Obstacle ──► Triton serves,
                                                           flashinfer_compiler.py compiles

FlashInfer calls ninja before it loads a module, which compiles again where a source is newer. So
"compiled" means that ninja has nothing to do, or that the module is part of the AOT package. Such
modules are loaded, as FlashInfer does later: with another CUDA or without its lock file that fails.
Always true: without a compiled module on the machine, flashinfer is not imported: that takes
seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge.errors import one_line
from forge.models.hf.attention.flashinfer_api import describe_prefill_module, load_wrappers
from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.kv_cache import KVCacheSpec

DISTRIBUTION = "flashinfer-python"

HOPPER = 9
"""Major compute capability of the only GPUs that FlashInfer's FA3 runs on."""

NINJA_TIMEOUT_S = 20.0


class PrefillModule(NamedTuple):
    """Module of FlashInfer's prefill kernels, by the arguments that it is compiled for.

    backend       "fa2" or "fa3"
    dtype         of queries, keys, values and outputs
    head_dim      in the cache
    """

    backend: str
    dtype: torch.dtype
    head_dim: int
    has_window: bool
    has_softcap: bool

    def describe(self) -> Any:
        """Return FlashInfer's JitSpec of the module."""
        return describe_prefill_module(
            self.backend,
            self.dtype,
            self.head_dim,
            has_window=self.has_window,
            has_softcap=self.has_softcap,
        )

    def to_word(self) -> str:
        """Return the module as one word of a command line."""
        dtype_name = str(self.dtype).removeprefix("torch.")
        flags = (str(int(flag)) for flag in (self.has_window, self.has_softcap))
        return ",".join((self.backend, dtype_name, str(self.head_dim), *flags))

    @classmethod
    def from_word(cls, word: str) -> PrefillModule:
        """Return the module of a word that `to_word` wrote."""
        backend, dtype_name, head_dim, has_window, has_softcap = word.split(",")
        dtype = getattr(torch, dtype_name)
        return cls(backend, dtype, int(head_dim), has_window == "1", has_softcap == "1")


class Obstacle(NamedTuple):
    """Reason why FlashInfer cannot serve, and what removes it.

    reason    text for the log
    missing   modules whose compilation removes the obstacle; () where none does
    """

    reason: str
    missing: tuple[PrefillModule, ...] = ()


def required_modules(layers: Sequence[LayerSpec], spec: KVCacheSpec) -> list[PrefillModule]:
    """Return the modules that a model's layers need. FA3 has neither windows nor soft caps."""
    modules = []
    for layer in layers:
        has_window, has_softcap = bool(layer.window), bool(layer.softcap)
        backends = ("fa2",) if has_window or has_softcap else ("fa3", "fa2")
        modules += [
            PrefillModule(backend, spec.dtype, spec.head_dim, has_window, has_softcap)
            for backend in backends
        ]
    return list(dict.fromkeys(modules))


def is_installed() -> bool:
    """Return whether flashinfer can be imported; it is not imported."""
    return find_spec("flashinfer") is not None


def find_obstacle(modules: Sequence[PrefillModule], device: torch.device) -> Obstacle | None:
    """Return why FlashInfer cannot serve from compiled modules, or None where it can."""
    if not is_installed():
        return Obstacle("flashinfer is not installed")
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        return Obstacle(f"FA3 runs on compute capability 9.x, this GPU has {major}.{minor}")
    # Any error of a library that is not needed: another version, a read-only folder, no home, a
    # broken installation.
    try:
        if not may_have_modules():
            return Obstacle("its modules are not compiled on this machine", tuple(modules))
        load_wrappers()
        missing = tuple(module for module in modules if not _is_compiled(module.describe()))
        if missing:
            names = ", ".join(f"{each.backend} for heads of {each.head_dim}" for each in missing)
            return Obstacle(f"not compiled: {names}", missing)
        for module in modules:
            module.describe().build_and_load()
    except Exception as error:
        return Obstacle(f"it cannot be used: {one_line(error)}")
    return None


def may_have_modules() -> bool:
    """Return whether this machine has any compiled prefill module of the installed version.

    The folders are those of FlashInfer 0.6. FlashInfer's own answer needs its import, which takes
    seconds; where another version has other folders, Triton serves.
    """
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    try:
        folder = _cache_folder() / version(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    pattern = "batch_prefill*/batch_prefill*.so"
    return any(folder.glob(f"*/cached_ops/{pattern}")) or any(
        match for aot_folder in _aot_folders() for match in aot_folder.glob(pattern)
    )


def missing_tools() -> list[str]:
    """Return what keeps this machine from a compilation of modules, as words of a sentence."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return ["permission (FLASHINFER_DISABLE_JIT)"]
    cxx = (os.environ.get("CXX") or "c++").split()[0]
    paths = {"nvcc": find_nvcc(), **{name: shutil.which(name) for name in ("ninja", cxx)}}
    return [name for name, path in paths.items() if not path]


def find_nvcc() -> str | None:
    """Return the path of nvcc, where FlashInfer finds it too, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _aot_folders() -> list[Path]:
    """Return the folders of the modules that an ahead-of-time build of FlashInfer contains."""
    spec = find_spec("flashinfer")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return [Path(folder, "data", "aot") for folder in folders]


def _cache_folder() -> Path:
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    return Path(base) / ".cache" / "flashinfer"


def _is_compiled(spec: Any) -> bool:
    """Return whether FlashInfer loads the module of this JitSpec without compiling it."""
    if spec.is_aot:
        return True
    if not spec.is_compiled or shutil.which("ninja") is None:
        return False
    spec.write_ninja()
    command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=NINJA_TIMEOUT_S, check=False
    )
    return "no work to do" in result.stdout
