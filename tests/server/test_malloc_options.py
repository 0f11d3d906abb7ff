"""Options of malloc: a large block is mapped and returned, whatever was freed before."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from forge.server.malloc_options import set_malloc_options


class Mallinfo2(ctypes.Structure):
    _fields_ = [(f"field{index}", ctypes.c_size_t) for index in range(10)]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
set_malloc_options()
bytearray(24 << 20)
before = mallinfo2().field4
held = bytearray(1 << 20)
print(mallinfo2().field4 - before)
"""
"""Prints the mapped bytes that 1 MiB takes after 24 MiB have been freed. Field 4 is hblkhd."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are those of glibc")
@pytest.mark.parametrize(("given", "is_mapped"), [({}, True), ({"MALLOC_PERTURB_": "0"}, False)])
def test_a_large_block_is_mapped_after_a_larger_one_was_freed(
    given: dict[str, str], is_mapped: bool
) -> None:
    """Options in the environment replace them all: then a freed block raises the threshold."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=outer | given, capture_output=True, text=True, check=True)
    assert (int(run.stdout) >= 1 << 20) == is_mapped
