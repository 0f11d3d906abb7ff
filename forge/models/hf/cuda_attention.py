"""CudaAttention: the pages read by our decode kernel and by FlashInfer's on an NVIDIA GPU.

Owns the choice of kernel and the plans they need. Knows no weights and no sampling.

    rows of one token     ours     needs no plan: tables and lengths stay on the device, so a CUDA
                                   graph records it (decode_attention.py)
    longer rows           FA3      planned once a step on the host, before any layer runs
      all from their start         reads the step's own keys, which stand side by side: no pages
    short longer rows     FA2      and what FA3 cannot: soft caps and windows
    recorded steps                 recorded_attention.py

FlashInfer's own choice on Hopper is the slow one, so `LONG_ROWS` says who takes what; it was
measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from forge.models.hf.attention import LayerSpec, Rotary, Rows
from forge.models.hf.decode_attention import DecodeAttention
from forge.models.hf.flashinfer_api import load_wrappers
from forge.models.hf.planned_attention import Kind, Planned, Whole, lengths_of, pages_of
from forge.models.hf.pool import KVPool
from forge.models.hf.recorded_attention import FEW_ROWS, Places, RecordedAttention, recordings

WORKSPACE_BYTES = 256 * 2**20
"""What FlashInfer's documentation advises: enough for any step that is not recorded."""

QUERY_TILE = 128
"""Most queries that FA2 takes at once, heads of a group counted as queries."""

LONG_ROWS = 256
"""Mean tokens of a row from which FA3 is the faster kernel: 512 tokens 30 us against 64 of FA2, 40
rows of 200 tokens 135 against 112, a layer with 32 and 8 heads of 128 on an H200."""

LONG_WHOLE_ROWS = 128
"""The same where every row begins at its first position, and FA3 reads no pages: 16 rows of 512
tokens 104 us against 135 of FA3 over pages, one of 8000 tokens 794 against 939."""

HEAD_DIMS = (64, 128, 256)
"""Sizes of a head that every kernel knows: pages are padded to the next."""


def padded_head_dim(head_dim: int) -> int | None:
    """The size that pages keep for a head of `head_dim`, or None for one too large."""
    return next((size for size in HEAD_DIMS if size >= head_dim), None)


class CudaAttention:
    """Kernels for one pool and one kind of layer."""

    def __init__(self, pool: KVPool, layers: Sequence[LayerSpec]) -> None:
        self._wrappers = load_wrappers()
        self._pool = pool
        self._layers = layers
        self._kinds = [Kind.of(spec) for spec in layers]
        device = pool.data.device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._recorded_workspace = self._workspace
        self._recorded = False
        self._kernels: dict[tuple[Kind, str], Planned] = {}
        self._whole: dict[Kind, Whole] = {}
        self._planned: dict[Kind, Planned | Whole] = {}
        self._decode = DecodeAttention(pool, layers, pdl=True)
        self._slots = self._kv_lens = pool.tables[0, :0]

    def begin(self, rows: Rows) -> None:
        """Plan the longer rows."""
        self._slots, self._kv_lens = rows.slots, rows.kv_lens
        longer = rows.spans[rows.num_decode :]
        if not longer:
            return
        lengths, ends = lengths_of(longer)
        mean = int(lengths.sum()) / len(lengths)
        padded = self._pool.shape.head_dim != self._layers[0].head_dim
        whole = not padded and mean >= LONG_WHOLE_ROWS and bool((lengths == ends).all())
        pages = None
        for kind in dict.fromkeys(self._kinds):
            plain = not kind.softcap and not kind.window
            if plain and whole:
                self._planned[kind] = side_by_side = self._whole_kernel(kind)
                side_by_side.plan(lengths)
            else:
                pages = pages_of(self._pool, longer, ends) if pages is None else pages
                long = plain and mean >= LONG_ROWS
                self._planned[kind] = paged = self._kernel(kind, "fa3" if long else "fa2")
                paged.plan(lengths, ends, pages)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Our kernel for the front of the batch, a planned one for the rest."""
        count = len(self._slots)
        if not count:
            return self._longer(layer, queries, keys, values)
        out = self._decode.attend(layer, queries[:count], self._slots, self._kv_lens)
        if count == len(queries):
            return out
        rest = (each[count:] for each in (queries, keys, values))
        return torch.cat((out, self._longer(layer, *rest)))

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        """Where every row has one token."""
        if len(self._slots) != len(qkv):
            return None
        return self._decode.attend_product(layer, qkv, rotary, self._slots, self._kv_lens)

    def _longer(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return self._planned[self._kinds[layer]].attend(layer, queries, keys, values)

    def exercises(self, rotary: Rotary) -> Iterator[Callable[[], object]]:
        """Calls that use every form of the decode kernel."""
        return self._decode.exercises(rotary)

    def recorders(
        self, tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> tuple[RecordedAttention, ...]:
        """As `recordings` says. All share their workspace: ask for the largest first."""
        rows = len(slots)
        spec = self._layers[0]
        group = spec.num_heads // spec.num_kv_heads
        device = torch.cuda.get_device_properties(self._workspace.device)
        least = 2 * device.multi_processor_count // spec.num_kv_heads + 1
        tiles = max(least, -(-tokens * group // QUERY_TILE) + max(rows, FEW_ROWS + 1) + 1)
        # Partial outputs and their sums, in fp32, of every tile a plan may ever have.
        needed = spec.num_heads * tiles * QUERY_TILE * (self._pool.shape.head_dim + 1) * 4
        if self._recorded_workspace.numel() < needed + 2**20:
            assert not self._recorded, "a larger workspace would be another place"
            self._recorded_workspace = torch.empty(
                needed + 2**20, dtype=torch.uint8, device=self._workspace.device
            )
        self._recorded = True
        places = partial(Places, self._pool, self._layers, self._recorded_workspace, tokens)
        return recordings(places, self._decode, tokens, slots, kv_lens)

    def _kernel(self, kind: Kind, backend: str) -> Planned:
        key = (kind, backend)
        if key not in self._kernels:
            wrapper = self._wrappers.paged(self._workspace, "HND", backend=backend)
            self._kernels[key] = Planned(self._pool, kind, self._layers[0].num_heads, wrapper)
        return self._kernels[key]

    def _whole_kernel(self, kind: Kind) -> Whole:
        if kind not in self._whole:
            wrapper = self._wrappers.ragged(self._workspace, "NHD", backend="fa3")
            self._whole[kind] = Whole(self._pool, kind, self._layers[0].num_heads, wrapper)
        return self._whole[kind]
