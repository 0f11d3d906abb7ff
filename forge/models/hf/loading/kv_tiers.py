"""KV tiers of a start: host memory that is pinned while weights load, and files of its blocks.

Owns the order of these: how many blocks the options make, and what their files mean, is known once
the weights are loaded. Knows no format of files.

    pinning, in threads ──────────────────────┐
    weights ─► layers ─► BlockLayout ─► HostTier, files ─► HostPool ─► blocks that fit ─► HFModel

Always true: the host pool has at least as many blocks as the HostTier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from forge.config import HostTier
from forge.errors import InvalidConfig
from forge.models.disk_cost import measure_fetch_ns
from forge.models.file_format import header_bytes
from forge.models.file_moves import FileMoves
from forge.models.hf.block_moves import BlockMoves, Moves
from forge.models.hf.checked_moves import CheckedMoves
from forge.models.hf.host_pool import SLAB_BYTES, HostPool, allocate_slabs
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.loading.cache_digest import kv_layout_digest
from forge.models.hf.loading.loaded_decoder import LoadedDecoder
from forge.models.tier_files import TierFiles, open_tier_files
from forge.tier_options import TierOptions

CreateMoves: TypeAlias = Callable[[KVCache, HostPool, FileMoves | None], Moves]


class BlockLayout(NamedTuple):
    """Blocks of a model that is loaded.

    num_bytes   of a block, over all layers
    digest      returns 64 bytes that decide, with the key, what a block means; it reads the weights
    """

    num_bytes: int
    digest: Callable[[], bytes]


class KVTiers(NamedTuple):
    """Tiers below the device.

    host_tier   choices about them; None: there are none
    files       files of host blocks; None: there are none
    disk_keys   keys of the files that are there, the least recently used first
    """

    host_tier: HostTier | None
    files: FileMoves | None = None
    disk_keys: tuple[bytes, ...] = ()


class TierSetup(NamedTuple):
    """Tiers below the device, before the layout of a block is known.

    host_bytes     bytes of host memory for blocks; a HostTier of more host blocks is made smaller
    open_tiers     opens the tiers of a model with such blocks, until its context ends
    create_moves   returns the moves between a cache and a host pool
    has_files      whether `open_tiers` opens files
    """

    host_bytes: int
    open_tiers: Callable[[BlockLayout], AbstractContextManager[KVTiers]]
    create_moves: CreateMoves = BlockMoves
    has_files: bool = False


class HostMemory(NamedTuple):
    """Host pool of a model and its files; None where there are none.

    disk_keys      keys of the files that are there, the least recently used first
    create_moves   returns the moves between a cache and the host pool
    """

    pool: HostPool | None
    files: FileMoves | None
    disk_keys: tuple[bytes, ...] = ()
    create_moves: CreateMoves = BlockMoves


NO_HOST_MEMORY = HostMemory(None, None)


def create_tier_setup(options: TierOptions, enable_prefix_caching: bool) -> TierSetup | None:
    """Return how a checkpoint's KV tiers are opened, or None without host memory for them."""
    if not options.kv_host_gib:
        return None
    options.check_prefix_caching(enable_prefix_caching)

    @contextmanager
    def open_tiers(layout: BlockLayout) -> Iterator[KVTiers]:
        block_bytes = layout.num_bytes
        host_tier = options.host_tier(
            block_bytes,
            header_bytes(block_bytes) + block_bytes,
            enable_prefix_caching=enable_prefix_caching,
        )
        # The digest reads all weights.
        digest = b"" if options.kv_disk_path is None else layout.digest()
        with open_tier_files(options, digest) as opened:
            if opened is None:
                yield KVTiers(host_tier)
            else:
                moves = FileMoves(opened.files, opened.executor)
                if options.measures_costs:
                    host_tier = _with_fetch_cost(host_tier, opened, block_bytes)
                yield KVTiers(host_tier, moves, opened.keys)

    create_moves = CheckedMoves if options.check_kv else BlockMoves
    return TierSetup(
        options.num_host_bytes, open_tiers, create_moves, options.kv_disk_path is not None
    )


def _with_fetch_cost(
    host_tier: HostTier | None, opened: TierFiles, block_bytes: int
) -> HostTier | None:
    """Return the tier with the measured time of reading a file."""
    if host_tier is None or host_tier.disk is None:
        return host_tier
    fetch_ns = measure_fetch_ns(opened.files, opened.keys, opened.executor, block_bytes)
    return replace(host_tier, disk=replace(host_tier.disk, fetch_block_ns=fetch_ns))


@contextmanager
def pin_host_memory(
    setup: TierSetup | None, device: torch.device
) -> Iterator[Future[list[torch.Tensor]] | None]:
    """Yield the slabs of a setup, which a thread allocates while the context is open."""
    if setup is None:
        yield None
        return
    with ThreadPoolExecutor(1) as executor:
        is_pinned = device.type == "cuda"
        yield executor.submit(allocate_slabs, setup.host_bytes, is_pinned=is_pinned)


@contextmanager
def open_host_memory(
    setup: TierSetup | None,
    slabs: Future[list[torch.Tensor]] | None,
    loaded: LoadedDecoder,
    config_fields: dict[str, Any],
    load_format: str,
    device: torch.device,
) -> Iterator[HostMemory]:
    """Open the setup's tiers, or those of `host_tier` in the fields where there is no setup.

    slabs           from `pin_host_memory`
    config_fields   `host_tier` is set, and `cache_namespace` where there are files
    """
    spec, block_size = loaded.kv_cache_spec, config_fields["block_size"]
    block_bytes = spec.bytes_per_token * block_size
    if setup is None or slabs is None:
        host_tier: HostTier | None = config_fields.get("host_tier")
        pool = None
        if host_tier is not None:
            num_bytes = host_tier.num_blocks * block_bytes
            is_pinned = device.type == "cuda"
            pool = HostPool(
                allocate_slabs(num_bytes, is_pinned=is_pinned, block_bytes=block_bytes), block_bytes
            )
        yield HostMemory(pool, None)
        return

    @cache
    def digest() -> bytes:
        return kv_layout_digest(
            loaded.checkpoint,
            spec,
            block_size,
            decoder=type(loaded.decoder).__name__,
            load_format=load_format,
            device=device,
        )

    with setup.open_tiers(BlockLayout(block_bytes, digest)) as tiers:
        host_tier = tiers.host_tier
        if host_tier is None:
            yield NO_HOST_MEMORY
            return
        pool = HostPool(slabs.result(), block_bytes)
        if host_tier.num_blocks and not pool.num_blocks:
            raise InvalidConfig(
                "kv_host_gib",
                f"a block of {block_bytes} bytes is larger than the {SLAB_BYTES} that are "
                "allocated in one piece",
                "Give a smaller block_size, or leave kv_host_gib out",
            )
        num_blocks = min(host_tier.num_blocks, pool.num_blocks)
        config_fields["host_tier"] = replace(host_tier, num_blocks=num_blocks)
        if tiers.files is not None:
            config_fields["cache_namespace"] = digest().hex()
        yield HostMemory(pool, tiers.files, tiers.disk_keys, setup.create_moves)
