"""Compiled kernels on disk: built once, and again wherever the file cannot be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")  # the package imports it

from forge.models.hf.binary_cache import cache_folder, is_writable, load_or_build

KEY = (b"source", b"-DA=1", b"13.0")


class Compiler:
    """Builds a binary and counts."""

    def __init__(self, binary: bytes = b"cubin") -> None:
        self.binary, self.num_builds = binary, 0

    def __call__(self) -> bytes:
        self.num_builds += 1
        return self.binary


def test_a_binary_is_built_once(tmp_path: Path):
    compiler = Compiler()
    folder = tmp_path / "new" / "kernels"
    assert [load_or_build(folder, KEY, compiler) for _ in range(3)] == [b"cubin"] * 3
    assert compiler.num_builds == 1
    assert len(list(folder.iterdir())) == 1  # no temporary file is left


@pytest.mark.parametrize(
    "other",
    [(b"sourc", b"e-DA=1", b"13.0"), (b"source", b"-DA=1", b"13.1"), (b"source", b"-DA=1")],
)
def test_another_key_is_another_binary(tmp_path: Path, other: tuple[bytes, ...]):
    load_or_build(tmp_path, KEY, Compiler(b"one"))
    assert load_or_build(tmp_path, other, Compiler(b"other")) == b"other"
    assert load_or_build(tmp_path, KEY, Compiler(b"none")) == b"one"


@pytest.mark.parametrize("length", [0, 10, 32, 36])
def test_a_file_that_is_cut_off_is_built_again(tmp_path: Path, length: int):
    load_or_build(tmp_path, KEY, Compiler())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    compiler = Compiler()
    assert load_or_build(tmp_path, KEY, compiler) == b"cubin" and compiler.num_builds == 1
    assert load_or_build(tmp_path, KEY, compiler) == b"cubin" and compiler.num_builds == 1


def test_a_flipped_bit_is_built_again(tmp_path: Path):
    load_or_build(tmp_path, KEY, Compiler())
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert load_or_build(tmp_path, KEY, Compiler(b"new")) == b"new"


def test_a_folder_that_cannot_be_made_costs_a_compilation_and_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("")
    compiler = Compiler()
    folder = tmp_path / "file" / "kernels"
    assert [load_or_build(folder, KEY, compiler) for _ in range(2)] == [b"cubin"] * 2
    assert compiler.num_builds == 2
    assert load_or_build(None, KEY, compiler) == b"cubin"


@pytest.mark.parametrize(("mode", "is_used"), [(0o755, True), (0o770, True), (0o707, False)])
def test_a_folder_that_everyone_can_write_to_is_not_used(tmp_path: Path, mode: int, is_used: bool):
    load_or_build(tmp_path, KEY, Compiler(b"of someone"))
    tmp_path.chmod(mode)
    binary = load_or_build(tmp_path, KEY, Compiler())
    assert binary == (b"of someone" if is_used else b"cubin")


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load_or_build(tmp_path, KEY, Compiler(b"of someone"))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert load_or_build(tmp_path, KEY, Compiler()) == b"cubin"


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    def fail() -> bytes:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        load_or_build(tmp_path, KEY, fail)
    assert os.listdir(tmp_path) == []


def test_the_folder_is_among_the_users_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "forge" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/forge/kernels")


def test_a_folder_is_writable_if_a_file_can_be_made_in_it(tmp_path: Path):
    assert is_writable(tmp_path) and not list(tmp_path.iterdir())
    assert not is_writable(tmp_path / "none")
    assert not is_writable(Path("/proc"))
