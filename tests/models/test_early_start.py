"""Work that a start begins early: reading weights, and no harm where there is nothing to do."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.models import early_start
from forge.models.early_start import CHUNK_BYTES, begin_early, create_context, read_files


def test_every_file_is_read_to_its_end(tmp_path: Path):
    sizes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 3]
    paths = [tmp_path / f"{size}.safetensors" for size in sizes]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    assert read_files(paths) == sum(sizes)


def test_nothing_is_read_where_the_files_exceed_half_of_the_free_memory(tmp_path: Path):
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    small, large = tmp_path / "a", tmp_path / "b"
    small.write_bytes(b"weights")
    with large.open("wb") as file:
        file.truncate(2 * free_bytes)  # a hole, which takes no room
    assert read_files([small, large]) == 0


def test_a_file_that_is_gone_ends_the_reading_only(tmp_path: Path):
    assert read_files([tmp_path / "gone"]) == 0


def test_a_machine_without_a_driver_has_no_context(monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    create_context()


@pytest.mark.parametrize(
    ("uses_gpu", "reads_weights", "names"),
    [(False, True, ["forge-disk"]), (False, False, [])],
)
def test_only_what_is_needed_is_begun(
    uses_gpu: bool, reads_weights: bool, names: list[str], tmp_path: Path
):
    threads = begin_early(tmp_path, uses_gpu=uses_gpu, reads_weights=reads_weights)
    assert [thread.name for thread in threads] == names
    for thread in threads:
        assert thread.daemon
        thread.join(20)


def test_weights_that_a_folder_has_twice_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("consolidated", "model-00001-of-00002", "model-00002-of-00002"):
        (tmp_path / f"{name}.safetensors").touch()
    found: list[str] = []
    monkeypatch.setattr(
        early_start, "read_files", lambda paths: found.extend(p.stem for p in paths)
    )
    (thread,) = begin_early(tmp_path, uses_gpu=False, reads_weights=True)
    thread.join(20)
    assert found == ["model-00001-of-00002", "model-00002-of-00002"]


@pytest.mark.parametrize(
    ("library", "names"), [("torch_cpu", []), ("torch_cuda", ["forge-driver"])]
)
def test_a_torch_without_cuda_takes_no_memory_of_a_gpu(
    library: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "lib" / f"lib{library}.so").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(early_start, "create_context", lambda: None)
    threads = begin_early(tmp_path, uses_gpu=True, reads_weights=False)
    assert [thread.name for thread in threads] == names


class _Driver:
    """A CUDA driver that answers with a status and a number of GPUs."""

    def __init__(self, status: int, num_gpus: int) -> None:
        self._status, self._num_gpus = status, num_gpus

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._num_gpus
        return 0


@pytest.mark.parametrize(
    ("torch_has_cuda", "status", "num_gpus", "expected"),
    [(True, 0, 2, True), (True, 0, 0, False), (True, 100, 1, False), (False, 0, 1, False)],
)
def test_a_gpu_needs_a_torch_with_cuda_a_driver_and_a_device(
    torch_has_cuda: bool,
    status: int,
    num_gpus: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(early_start, "torch_has_cuda", lambda: torch_has_cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(status, num_gpus))
    assert early_start.has_gpu() is expected
