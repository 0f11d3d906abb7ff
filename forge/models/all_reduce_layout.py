"""AllReduceLayout: memory and launches of the kernels of all_reduce.cu. Needs no torch.

Owns offsets and sizes of what is shared, and how a call is divided among CTAs. Knows no device.

    memory of a rank, at the same offsets on each
    packet slots [parity][rank] | data slots [parity][rank] | data flags [parity][CTA][rank]

Always true: ranks with equal layouts divide an equal call equally, which the kernels rely on. A
grid has at most `max_ctas` CTAs, which a device runs at the same time: so a CTA that waits for the
CTA of another rank keeps none from starting.
"""

from __future__ import annotations

from typing import NamedTuple

VECTOR_BYTES = 16
"""Bytes of a load. Rows and messages have a multiple of them."""

MAX_VECTORS = 4
"""Most vectors of a chunk that a thread has: a macro of all_reduce.cu."""

_CHUNK_VECTORS = 128
"""Vectors of a CTA where there is no norm and the message is small: many CTAs store at a time."""


KERNELS = (
    "reduce_packets",
    "reduce_packets_wide",
    "reduce_flagged",
    "reduce_flagged_wide",
    "gather_packets",
)
"""Kernels of all_reduce.cu. Threads of the wide ones have several vectors of a chunk."""


def has_flags(kernel: str) -> bool:
    """Return whether a kernel has flags next to its data. Those with and without share nothing."""
    return kernel.startswith("reduce_flagged")


class AllReduceLaunch(NamedTuple):
    """Launch of one call.

    kernel          function of all_reduce.cu
    num_ctas        CTAs
    num_threads     threads of a CTA
    chunk_vectors   vectors of 16 bytes that a CTA sums at a time; a row where there is a norm
    """

    kernel: str
    num_ctas: int
    num_threads: int
    chunk_vectors: int


class ExchangeRegion(NamedTuple):
    """Memory that one kernel uses on every rank, in bytes."""

    slots_offset: int
    slot_bytes: int
    flags_offset: int


class AllReduceLayout(NamedTuple):
    """Sizes on which all ranks agree.

    world_size         ranks
    max_ctas           most CTAs of a grid
    max_threads        most threads of a CTA, a multiple of 32
    max_packet_bytes   longest message that is sent as packets; 0: none
    max_bytes          longest message
    """

    world_size: int
    max_ctas: int
    max_threads: int
    max_packet_bytes: int
    max_bytes: int

    @property
    def max_row_bytes(self) -> int:
        """Longest row of which a CTA computes the norm."""
        return self.max_threads * MAX_VECTORS * VECTOR_BYTES

    @property
    def total_bytes(self) -> int:
        """Shared memory of a rank."""
        flagged = self.region("reduce_flagged")
        return _round_up(flagged.flags_offset + self._flags_bytes, 512)

    @property
    def _flags_bytes(self) -> int:
        return 4 * 2 * self.max_ctas * self.world_size

    def region(self, kernel: str) -> ExchangeRegion:
        """Return the memory of a kernel. Those of packets share it, and have no flags."""
        # Two lines of 512 bytes for each 32 vectors, the last 32 included.
        packet_slot = 2 * _round_up(self.max_packet_bytes, 512)
        if not has_flags(kernel):
            return ExchangeRegion(0, packet_slot, 0)
        start = 2 * self.world_size * packet_slot
        data_slot = _round_up(self.max_bytes, 512)
        return ExchangeRegion(start, data_slot, start + 2 * self.world_size * data_slot)

    def select_launch(self, num_bytes: int, row_bytes: int | None) -> AllReduceLaunch:
        """Return the launch for a message of `num_bytes`, a multiple of 16 and at most `max_bytes`.

        row_bytes   bytes of a row where the norm of each row is computed; None: no norm
        """
        is_short = num_bytes <= self.max_packet_bytes
        num_vectors = num_bytes // VECTOR_BYTES
        if row_bytes is None:
            share = max(-(-num_vectors // self.max_ctas), min(_CHUNK_VECTORS, num_vectors))
            num_threads = min(self.max_threads, _round_up(share, 32))
            chunk = num_threads * min(MAX_VECTORS, -(-share // num_threads))
        else:
            chunk = row_bytes // VECTOR_BYTES
            num_threads = min(self.max_threads, _round_up(chunk, 32))
        num_ctas = min(self.max_ctas, -(-num_vectors // chunk))
        kernel = "reduce_packets" if is_short else "reduce_flagged"
        if chunk > num_threads:
            kernel += "_wide"
        return AllReduceLaunch(kernel, num_ctas, num_threads, chunk)

    def select_gather(self, num_bytes: int) -> AllReduceLaunch:
        """Return the launch that gathers `num_bytes` of each rank, at most `max_packet_bytes`."""
        return self.select_launch(num_bytes, None)._replace(kernel="gather_packets")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
