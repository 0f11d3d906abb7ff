"""Kernels of sample.cu on the CPU: compiled with cuda_emulator.h, called through ctypes.

    sample.cu ─ cuda_emulator.h ─► a library for each Variant ─ ctypes ─► Kernels

Each launch draws the order in which the warps of a cluster go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import isfinite, nan
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from forge.request import SamplingParams
from forge.sampling import IMPOSSIBLE, MAX_GAP, logit_gaps, min_p_gap

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "forge/models/hf/sampling/sample.cu"
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
SHARED_STATE_BYTES = 13 * 1024


class Variant(NamedTuple):
    """Macros of a build.

    cluster, threads   CTAs of a row, threads of a CTA
    logit_type         F32, BF16 or F16
    uses_scratch       True where the cells are in global memory
    """

    cluster: int
    threads: int
    logit_type: str
    uses_scratch: bool = False


class Matrix:
    """Rows of logits in one buffer, between which there is NaN.

    rows         logits of each row, rounded to their type
    row_stride   logits from a row to the next
    address      first row; a multiple of 16, or one logit after such
    """

    def __init__(self, rows: Sequence[Sequence[float]], logit_type: str, *, aligned: bool) -> None:
        self.size = len(rows[0])
        self.row_stride = -(-self.size // 8) * 8 + (16 if aligned else 3)
        line = [nan] * (self.row_stride - self.size)
        cells = encode([x for row in rows for x in (*row, *line)], logit_type)
        self._buffer = ctypes.create_string_buffer(len(cells) * cells.itemsize + 32)
        start = ctypes.addressof(self._buffer)
        self.address = start - start % -16 + (0 if aligned else cells.itemsize)
        ctypes.memmove(self.address, cells.tobytes(), len(cells) * cells.itemsize)
        self.rows = [
            decode(cells[at : at + self.size], logit_type)
            for at in range(0, len(cells), self.row_stride)
        ]


def encode(values: Iterable[float], logit_type: str) -> array[Any]:
    if logit_type == "F32":
        return array("f", values)
    if logit_type == "F16":
        cut = [max(-65504.0, min(x, 65504.0)) if isfinite(x) else x for x in values]
        return array("H", struct.pack(f"{len(cut)}e", *cut))
    return array("H", array("f", values).tobytes()[2:] + b"\0\0")[::2]


def decode(cells: array[Any], logit_type: str) -> list[float]:
    if logit_type == "F32":
        return cells.tolist()
    if logit_type == "F16":
        return list(struct.unpack(f"{len(cells)}e", cells.tobytes()))
    return array("f", array("I", [x << 16 for x in cells]).tobytes()).tolist()


class Kernels:
    """A build of sample.cu. Each call draws the order of its warps."""

    def __init__(self, library: Path, variant: Variant) -> None:
        self.variant = variant
        self._library = ctypes.CDLL(str(library))
        self._rng = Random(str(variant))

    def sample(
        self,
        logits: Matrix,
        params: Sequence[SamplingParams],
        keys: Sequence[tuple[int, int]],
        *,
        rows: Sequence[int] | None = None,
        raw_flags: array[int] | None = None,
    ) -> list[tuple[int, int]]:
        """Return token and status of each row. `keys` are seeds and positions."""
        tokens, statuses = (array("i", [-5] * (len(params) + 1)) for _ in range(2))
        self._sample(logits, params, keys, rows, raw_flags, tokens, statuses, None, 0, None)
        assert tokens.pop() == statuses.pop() == -5
        return list(zip(tokens, statuses, strict=True))

    def sample_part(
        self,
        logits: Matrix,
        params: Sequence[SamplingParams],
        keys: Sequence[tuple[int, int]],
        first_token: int,
    ) -> list[tuple[float, int, int]]:
        """Return score, token and status of each row, whose logits begin at id `first_token`."""
        tokens, statuses = (array("i", [-5] * len(params)) for _ in range(2))
        scores = array("d", [-5.0] * (len(params) + 1))
        self._sample(logits, params, keys, None, None, tokens, statuses, None, first_token, scores)
        assert scores.pop() == -5.0
        return list(zip(scores, tokens, statuses, strict=True))

    def kept_tokens(self, logits: Matrix, params: Sequence[SamplingParams]) -> list[list[int]]:
        """Return the tokens of each row that the filters keep."""
        cuts = array("i", [-1, -1] * len(params))
        self._sample(logits, params, [(0, 0)] * len(params), None, None, None, None, cuts, 0, None)
        return [
            [
                token
                for token, gap in enumerate(logit_gaps(row, each.temperature))
                if gap != IMPOSSIBLE and (gap, token) <= (cuts[2 * at], cuts[2 * at + 1])
            ]
            for at, (row, each) in enumerate(zip(logits.rows, params, strict=True))
        ]

    def _sample(
        self,
        logits: Matrix,
        params: Sequence[SamplingParams],
        keys: Sequence[tuple[int, int]],
        rows: Sequence[int] | None,
        raw_flags: array[int] | None,
        *outputs: array[Any] | int | None,
    ) -> None:
        slots = self._rng.sample(range(2 * len(params)), len(params))
        table = bytearray(b"\xee" * 48 * 2 * len(params))
        for slot, each, (seed, _) in zip(slots, params, keys, strict=True):
            struct.pack_into("Q5d", table, 48 * slot, seed, *slot_numbers(each, logits.size))
        self._run_rows(
            "run_sample",
            logits,
            len(params),
            rows,
            (array("i", slots), array("i", [at for _, at in keys]), array("q", table), raw_flags),
            *outputs,
        )

    def logprobs(
        self, logits: Matrix, tokens: Sequence[int], num_top: int, rows: Sequence[int] | None
    ) -> list[list[float]]:
        """Return token, log probability, the most likely tokens, theirs."""
        width = 2 + 2 * num_top
        out = array("d", [-5.0] * (width * len(tokens) + 1))
        self._run_rows(
            "run_logprobs", logits, len(tokens), rows, (array("q", tokens),), num_top, out
        )
        assert out.pop() == -5.0
        return [out[at : at + width].tolist() for at in range(0, len(out), width)]

    def _run_rows(
        self,
        name: str,
        logits: Matrix,
        num_rows: int,
        rows: Sequence[int] | None,
        inputs: tuple[array[Any] | None, ...],
        *outputs: array[Any] | int | None,
    ) -> None:
        chunk = -(-logits.size // self.variant.cluster // 8) * 8
        scratch = array("I", [0xA5A5A5A5] * (num_rows * chunk + 4))
        table = None if rows is None else array("q", rows)
        self.run(
            name,
            num_rows,
            logits.address,
            logits.row_stride,
            table,
            *inputs,
            logits.size,
            chunk,
            scratch if self.variant.uses_scratch else None,
            *outputs,
        )
        assert set(scratch[-4:]) == {0xA5A5A5A5}

    def run(self, name: str, *arguments: array[Any] | int | None) -> None:
        """Launch a kernel."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        seed = self._rng.getrandbits(31)
        error = function(seed, *map(pointer_or_integer, arguments))
        assert error is None, (name, self.variant, seed, error)


def slot_numbers(params: SamplingParams, vocab_size: int) -> tuple[float, ...]:
    """Return SamplingNumbers of forge/models/hf/sampling/slot_params.py, which needs numpy."""
    if params.greedy:
        return 1.0, 0.0, vocab_size, 1.0, MAX_GAP
    top_k = min(params.top_k or vocab_size, vocab_size)
    return 1.0 / params.temperature, 1.0, top_k, params.top_p, min_p_gap(params.min_p)


def compile_kernels(variant: Variant, folder: Path) -> Path:
    """Return the library of sample.cu with the emulator, in a folder of libraries."""
    macros = {
        "CLUSTER": variant.cluster,
        "THREADS": variant.threads,
        "SHARED_STATE_BYTES": SHARED_STATE_BYTES,
        f"LOGIT_{variant.logit_type}": 1,
    }
    return compile_emulated(folder, macros, (SOURCE, HERE / "sample_kernel_entry.cpp"))


def library_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder that all workers of this run share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


def compile_emulated(folder: Path, macros: Mapping[str, int], sources: Sequence[Path]) -> Path:
    """Return the library of sources with the emulator; compile it where the folder has none.

    sources   what follows cuda_emulator.h, in order; the last has the entry points
    """
    headers = (HERE / "cuda_emulator.h", *sources)
    key = repr((sorted(macros.items()), [each.read_bytes() for each in headers]))
    library = folder / f"{sha256(key.encode()).hexdigest()}.so"
    # One worker compiles, and others wait for it.
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".part")
            run_compiler(partial, macros, headers)
            partial.rename(library)
    return library


def run_compiler(library: Path, macros: Mapping[str, int], sources: Sequence[Path]) -> None:
    """Compile the last source, after the others, into a library."""
    *headers, entry = sources
    subprocess.run(
        [
            str(COMPILER),
            *"-std=c++17 -Og -ffp-contract=off -U_FORTIFY_SOURCE -shared -fPIC -w".split(),
            *(f"-D{name}={value}" for name, value in macros.items()),
            *(flag for header in headers for flag in ("-include", str(header))),
            *(str(entry), "-o", str(library)),
        ],
        check=True,
        timeout=100,
    )


def pointer_or_integer(value: array[Any] | int | None) -> ctypes.c_void_p:
    """Return an argument of an entry point: the address of an array, or the number itself."""
    return ctypes.c_void_p(value.buffer_info()[0] if isinstance(value, array) else value)
