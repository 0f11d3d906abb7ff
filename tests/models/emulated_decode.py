"""Kernels of decode.cu on the CPU: compiled with the emulator, called through ctypes.

    decode.cu ─ cuda_emulator.h, cuda_emulator_attention.h ─► a library for each Variant ─► attend

The kernels' queries, keys and values of the new tokens are NaN until the kernel waits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from math import exp, frexp, isnan, ldexp, nan, sqrt
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.models.emulated_kernels import (
    HERE,
    compile_emulated,
    decode,
    encode,
    pointer_or_integer,
)

SOURCE = HERE.parents[1] / "forge/models/hf/attention/decode.cu"
EPS = 0.1
"""Large, so that a norm without it shows."""


class Variant(NamedTuple):
    """Macros of a build."""

    group: int
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 32
    tile: int = 16
    warps: int = 2
    stages: int = 2
    min_tiles: int = 1
    start_tiles: int = 2
    cell_type: str = "BF16"

    @property
    def block_cells(self) -> int:
        """Numbers of one head's keys in a block."""
        return self.block_size * self.head_dim


class Case(NamedTuple):
    """One step.

    lengths       positions of each row, the new one included
    num_ctas      CTAs of the grid
    num_padding   rows at the end, of one position, that share the scratch slot and its block
    """

    variant: Variant
    lengths: tuple[int, ...]
    num_ctas: int = 3
    fused_qkv: bool = True
    norms: bool = False
    num_padding: int = 0


class Cells:
    """Numbers of the variant's type in memory that is a multiple of 16."""

    def __init__(self, values: Sequence[float], cell_type: str) -> None:
        cells = encode(values, cell_type)
        self._type, self._size = cell_type, len(cells)
        self._buffer = ctypes.create_string_buffer(len(cells) * cells.itemsize + 32)
        start = ctypes.addressof(self._buffer)
        self.address = start - start % -16
        self.num_bytes = len(cells) * cells.itemsize
        ctypes.memmove(self.address, cells.tobytes(), self.num_bytes)

    def values(self) -> list[float]:
        """Return the numbers."""
        cells = array("f" if self._type == "F32" else "H")
        cells.frombytes(ctypes.string_at(self.address, self.num_bytes))
        return decode(cells, self._type)


class Step:
    """Numbers of a case, rounded to its type, and where they are in memory."""

    def __init__(self, case: Case, rng: Random) -> None:
        variant = case.variant
        self.case, self._rng = case, rng
        dim, kv_heads = variant.head_dim, variant.kv_heads
        rows = len(case.lengths)
        num_bound = rows - case.num_padding
        counts = [-(-length // variant.block_size) for length in case.lengths[:num_bound]]
        block_ids = rng.sample(range(sum(counts) + 2), sum(counts))
        self.scratch_block = sum(counts) + 2
        self.slots = [*rng.sample(range(rows + 1), num_bound), *[rows + 1] * case.num_padding]
        self.table_stride = max(1, *counts, 1) + 1
        # Entries after the end of a table are never read.
        self.tables = [2**30] * (self.table_stride * (rows + 2))
        self.tables[-self.table_stride] = self.scratch_block
        for slot, count in zip(self.slots, counts, strict=False):
            for index in range(count):
                self.tables[slot * self.table_stride + index] = block_ids.pop()
        # Positions that no row has stay NaN.
        block_cells = [nan] * ((self.scratch_block + 1) * 2 * kv_heads * variant.block_cells)
        for row, length in enumerate(case.lengths):
            for position in range(length - case.fused_qkv):
                for head in range(2 * kv_heads):
                    at = self.cell_index(row, head, position)
                    block_cells[at : at + dim] = [rng.gauss(0.0, 1.0) for _ in range(dim)]
        self.num_heads = variant.group * kv_heads
        self.q_heads = self.num_heads + (2 * kv_heads if case.fused_qkv else 0)
        self.q_stride = (self.q_heads + 1) * dim
        self.blocks = Cells(block_cells, variant.cell_type)
        self.q = self._cells(self.q_stride * rows)
        self.weights = [self._cells(dim) for _ in range(2)]
        numbers = [[rng.gauss(0.0, 1.0) for _ in range(dim // 2)] * 2 for _ in range(2)]
        longest = max(case.lengths)
        self.cos, self.sin = (
            Cells([x + 0.01 * position for position in range(longest) for x in each], "F32")
            for each in numbers
        )

    def _cells(self, count: int) -> Cells:
        return Cells([self._rng.gauss(0.0, 1.0) for _ in range(count)], self.case.variant.cell_type)

    def cell_index(self, row: int, head: int, position: int) -> int:
        """Return the index of a key's first number; heads from kv_heads on are those of values."""
        variant = self.case.variant
        block, offset = divmod(position, variant.block_size)
        block_id = self.tables[self.slots[row] * self.table_stride + block]
        at = (block_id * 2 * variant.kv_heads + head) * variant.block_cells
        return at + offset * variant.head_dim

    def expected(self) -> tuple[list[list[float]], dict[int, list[float]]]:
        """Return the output of each row and head, and what is written at which number of blocks."""
        case, variant = self.case, self.case.variant
        dim, kv_heads = variant.head_dim, variant.kv_heads
        blocks, q = self.blocks.values(), self.q.values()
        outputs, writes = [], {}
        for row, length in enumerate(case.lengths):
            heads = [
                q[at : at + dim]
                for at in range(row * self.q_stride, row * self.q_stride + self.q_heads * dim, dim)
            ]
            for head in range(self.num_heads if length else 0):
                kv_head = head // variant.group
                keys, values = (
                    [
                        blocks[at : at + dim]
                        for at in (
                            self.cell_index(row, kind * kv_heads + kv_head, position)
                            for position in range(length - case.fused_qkv)
                        )
                    ]
                    for kind in range(2)
                )
                query = heads[head]
                if case.fused_qkv:
                    query = self._rotate(query, 0, length - 1)
                    keys.append(self._rotate(heads[self.num_heads + kv_head], 1, length - 1))
                    values.append(heads[self.num_heads + kv_heads + kv_head])
                    for kind, written in enumerate((keys[-1], values[-1])):
                        at = self.cell_index(row, kind * kv_heads + kv_head, length - 1)
                        writes[at] = written
                outputs.append(attend(query, keys, values))
            outputs += [] if length else [[nan] * dim] * self.num_heads
        return outputs, writes

    def _rotate(self, head: list[float], kind: int, position: int) -> list[float]:
        """Return a head after norm and rotation, rounded to the type after each step."""
        dim, cell_type = len(head), self.case.variant.cell_type
        if self.case.norms:
            scale = 1.0 / sqrt(sum(x * x for x in head) / dim + EPS)
            normed = round_cells([x * scale for x in head], cell_type)
            weight = self.weights[kind].values()
            scaled = [x * w for x, w in zip(normed, weight, strict=True)]
            head = round_cells(scaled, cell_type)
        cos, sin = (
            each.values()[position * dim : (position + 1) * dim] for each in (self.cos, self.sin)
        )
        half = dim // 2
        partner = [-x for x in head[half:]] + head[:half]
        rotated = [x * c + y * s for x, y, c, s in zip(head, partner, cos, sin, strict=True)]
        return round_cells(rotated, cell_type)


def round_cells(values: Sequence[float], cell_type: str) -> list[float]:
    """Return the numbers rounded to the type, to nearest."""
    if cell_type == "BF16":
        # `encode` drops the low half of a float.
        parts = map(frexp, values)
        values = [ldexp(round(ldexp(part, 8)), exponent - 8) for part, exponent in parts]
    return decode(encode(values, cell_type), cell_type)


def attend(
    query: Sequence[float], keys: Sequence[Sequence[float]], values: Sequence[Sequence[float]]
) -> list[float]:
    """Return the output of one query head."""
    scale = len(query) ** -0.5
    scores = [scale * sum(map(float.__mul__, query, key)) for key in keys]
    top = max(scores)
    weights = [exp(score - top) for score in scores]
    return [
        sum(map(float.__mul__, weights, cells)) / sum(weights)
        for cells in zip(*values, strict=True)
    ]


class Result(NamedTuple):
    """What a launch wrote.

    outputs     of each row and head
    blocks      all numbers
    counters    of each row and key head, and one after them
    num_parts   partial results
    """

    outputs: list[list[float]]
    blocks: list[float]
    counters: list[int]
    num_parts: int


class DecodeKernels:
    """A build of decode.cu. Each call draws the order of its warps."""

    def __init__(self, library: Path, variant: Variant) -> None:
        self._variant = variant
        self._run = ctypes.CDLL(str(library)).run_decode
        self._run.restype = ctypes.c_char_p

    def run(self, step: Step, seed: int) -> Result:
        """Launch the kernel of the step."""
        case, variant = step.case, self._variant
        rows, dim = len(case.lengths), variant.head_dim
        workers = case.num_ctas * variant.warps
        halves = 2 if variant.group > 8 else 1
        partial_cells = 4 * 32 * (1 + halves * dim // 16)
        out = Cells([nan] * (rows * step.num_heads * dim), variant.cell_type)
        blocks = Cells(step.blocks.values(), variant.cell_type)
        partials = Cells([nan] * (2 * workers * partial_cells), "F32")
        counters = array("i", [0] * (rows * variant.kv_heads + 1))
        # What the kernel before writes.
        source = step.q if case.fused_qkv else step.blocks
        late = Cells([nan] * (source.num_bytes // 2), variant.cell_type)
        q, blocks = (late, blocks) if case.fused_qkv else (step.q, late)
        cos = step.cos.address if case.fused_qkv else None
        weights = [each.address if case.norms else None for each in step.weights]
        lengths, slots, tables = (
            array("i", each) for each in (case.lengths, step.slots, step.tables)
        )
        error = self._run(
            *(seed, case.num_ctas, shared_bytes(variant, rows)),
            *map(pointer_or_integer, (late.address, source.address, source.num_bytes)),
            *map(
                pointer_or_integer,
                (q.address, step.q_stride, slots, lengths, rows, tables, step.table_stride),
            ),
            *(
                pointer_or_integer(blocks.address),
                ctypes.c_double(dim**-0.5),
                pointer_or_integer(out.address),
            ),
            *map(pointer_or_integer, (partials.address, counters, cos, step.sin.address, *weights)),
            ctypes.c_double(EPS),
        )
        assert error is None, (error, case, seed)
        cells = out.values()
        return Result(
            [cells[at : at + dim] for at in range(0, len(cells), dim)],
            blocks.values(),
            counters.tolist(),
            sum(not isnan(x) for x in partials.values()[::partial_cells]),
        )


def shared_bytes(variant: Variant, num_rows: int) -> int:
    """Return the dynamic shared memory of a CTA."""
    ring = variant.warps * variant.stages * (4 * variant.tile * variant.head_dim + 8)
    return ring + 4 * (3 * num_rows + 32)


def compile_kernels(variant: Variant, folder: Path) -> Path:
    """Return the library of decode.cu with the emulator, in a folder of libraries."""
    macros = {
        **{name.upper(): value for name, value in variant._asdict().items()},
        f"TYPE_{variant.cell_type}": 1,
        "CTAS": 1,
    }
    header, entry = HERE / "cuda_emulator_attention.h", HERE / "decode_kernel_entry.cpp"
    return compile_emulated(folder, macros, (header, SOURCE, entry))
