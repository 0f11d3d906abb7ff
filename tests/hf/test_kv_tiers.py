"""A start with KV tiers: the digest of a checkpoint's blocks, and which files are found by it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.config import DeviceOptions, DiskTier, HostTier  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.block_files import BlockFiles  # noqa: E402
from forge.models.file_moves import FileMoves  # noqa: E402
from forge.models.hf.kv_cache import KVCacheSpec  # noqa: E402
from forge.models.hf.loading.cache_digest import (  # noqa: E402
    PIECE_BYTES,
    digest_files,
    kv_layout_digest,
)
from forge.models.hf.loading.checkpoint import open_checkpoint  # noqa: E402
from forge.models.hf.loading.draft_pair import open_pair  # noqa: E402
from forge.models.hf.loading.kv_tiers import (  # noqa: E402
    BlockLayout,
    KVTiers,
    TierSetup,
    create_tier_setup,
)
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.request import Request, SamplingParams  # noqa: E402
from forge.seam import executes_moves  # noqa: E402
from forge.tier_options import TierOptions  # noqa: E402
from tests.hf.families import create_module  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
OPTIONS = DeviceOptions(device="cpu")
TIER = HostTier(num_blocks=12, min_clean_percent=100, min_touches=1)
GEOMETRY = {"num_blocks": 6, "block_size": 8, "max_num_seqs": 2, "max_model_len": 64, "depth": 2}
PROMPTS = [tuple(range(20 * i + 3, 20 * i + 20)) for i in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return save_checkpoint(tmp_path_factory.mktemp("saved"))


# The digest.


def digest_of(folder: Path, dtype: str = "float32", **fields: Any) -> bytes:
    opened = open_checkpoint(str(folder), CPU, dtype).summary()
    return kv_layout_digest(
        opened,
        **{
            "kv_cache_spec": KVCacheSpec(3, 2, 32, opened.dtype),
            "block_size": 16,
            "decoder": "FusedDecoder",
            "load_format": "auto",
            "device": CPU,
            **fields,
        },
    )


def test_a_checkpoint_that_is_moved_has_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert digest_of(copy) == digest_of(checkpoint) and len(digest_of(copy)) == 64


@pytest.mark.parametrize("offset", [-1, -1000, -40_000])
def test_one_bit_of_the_weights_changes_the_digest(
    checkpoint: Path, tmp_path: Path, offset: int
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "other")
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[offset] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert digest_of(copy) != digest_of(checkpoint)


def test_all_else_that_decides_what_a_block_means_changes_the_digest(
    checkpoint: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "other")
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    other_tokenizer = shutil.copytree(checkpoint, tmp_path / "other tokenizer")
    with (other_tokenizer / "tokenizer.json").open("a") as file:
        file.write(" ")
    digests = [
        digest_of(checkpoint),
        digest_of(copy),
        digest_of(other_tokenizer),
        digest_of(checkpoint, dtype="bfloat16"),
        digest_of(checkpoint, block_size=32),
        digest_of(checkpoint, kv_cache_spec=KVCacheSpec(3, 2, 64, torch.float32)),
        digest_of(checkpoint, decoder="ModuleDecoder"),
        digest_of(checkpoint, load_format="dummy"),
    ]
    assert len(set(digests)) == len(digests)


def test_a_digest_covers_every_piece_and_the_order_of_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(PIECE_BYTES) + b"a")
    two.write_bytes(b"")
    digests = {digest_files([one, two]), digest_files([two, one]), digest_files([one])}
    one.write_bytes(bytes(PIECE_BYTES) + b"b")
    digests.add(digest_files([one, two]))
    one.write_bytes(bytes(PIECE_BYTES))
    digests.add(digest_files([one, two]))
    assert len(digests) == 5


# Starts.


class Served(NamedTuple):
    """Outputs of an engine on files, how many blocks it fetched, and the files at its end."""

    tokens: list[list[int]]
    num_fetched: int
    keys: set[bytes]


def serve(
    folder: Path,
    files_folder: Path,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    options: DeviceOptions = OPTIONS,
    **geometry: Any,
) -> Served:
    """Open a checkpoint with a host tier and files, and serve each prompt twice."""
    stores = []

    with ThreadPoolExecutor(2) as executor:

        @contextmanager
        def open_tiers(layout: BlockLayout) -> Iterator[KVTiers]:
            store = BlockFiles(files_folder, layout.digest(), 10**8)
            stores.append(store)
            disk = DiskTier(max_files=100)
            yield KVTiers(replace(TIER, disk=disk), FileMoves(store, executor))

        setup, geometry = TierSetup(2**24, open_tiers), {**GEOMETRY, **geometry}
        with open_model(str(folder), geometry, options, tiers=setup) as loaded:
            engine = Engine(loaded.model, loaded.config, loaded.tokenizer)
            engine.add_disk_keys(stores[0].keys())
            tokens = [tokens_of(engine, *each) for each in enumerate([*prompts, *prompts])]
    keys = set(stores[0].keys())
    stores[0].close()
    return Served(tokens, engine.scheduler.disk_cache.num_fetched_blocks, keys)


def tokens_of(engine: Engine, id: int, prompt: tuple[int, ...]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.submit(Request(id, prompt, params))
    tokens = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens += delta.tokens
    return tokens


def test_files_are_found_by_the_same_checkpoint_and_by_no_other(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The first two are at different paths. The last one takes the path of the one before it."""
    files, path = tmp_path / "kv", tmp_path / "model"
    first = serve(checkpoint, files)
    assert first.keys
    shutil.copytree(checkpoint, path)
    moved = serve(path, files)
    assert moved.tokens == first.tokens
    # Of the eight blocks of the prompts all but those that were the last to leave the device.
    assert moved.num_fetched >= 4 and moved.keys >= first.keys
    create_module("qwen3", torch.float32, seed=1).save_pretrained(path)
    other = serve(path, files)
    with open_model(str(path), GEOMETRY, OPTIONS) as loaded:
        engine = Engine(loaded.model, loaded.config)
        assert other.tokens == [tokens_of(engine, i, PROMPTS[i % 4]) for i in range(8)]
    assert other.tokens != first.tokens
    new_keys = other.keys - moved.keys
    assert new_keys and other.keys > moved.keys, "no file of the other model was removed"
    assert other.num_fetched <= len(new_keys)


def test_a_host_tier_is_made_as_large_as_the_memory_that_was_given(checkpoint: Path) -> None:
    layouts = []

    @contextmanager
    def open_tiers(layout: BlockLayout) -> Iterator[KVTiers]:
        layouts.append(layout)
        yield KVTiers(replace(TIER, num_blocks=1000))

    with open_model(
        str(checkpoint), GEOMETRY, OPTIONS, tiers=TierSetup(100_000, open_tiers)
    ) as loaded:
        tier = loaded.config.host_tier
        assert layouts[0].num_bytes == 8 * 2 * 3 * 2 * 32 * 4
        assert tier is not None and tier.num_blocks == 100_000 // layouts[0].num_bytes
        assert str(checkpoint) in loaded.config.cache_namespace, "without files it is not hashed"
        assert executes_moves(loaded.model)


def test_host_memory_that_no_block_fits_into_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a large model, of 4,096 positions, is larger than a slab."""
    monkeypatch.setattr("forge.models.hf.host_pool.SLAB_BYTES", 12_000)
    setup = create_tier_setup(TierOptions(kv_host_gib=0.001), enable_prefix_caching=True)
    with (
        pytest.raises(InvalidConfig, match=r"kv_host_gib: a block of 12288 .* block_size"),
        open_model(str(checkpoint), GEOMETRY, OPTIONS, tiers=setup),
    ):
        pass


def test_a_host_tier_of_the_engines_options_needs_no_setup(checkpoint: Path) -> None:
    with open_model(str(checkpoint), {**GEOMETRY, "host_tier": TIER}, OPTIONS) as loaded:
        engine = Engine(loaded.model, loaded.config)
        first = [tokens_of(engine, index, PROMPTS[index % 4]) for index in range(8)]
        assert first[:4] == first[4:]
        assert engine.scheduler.host_cache.num_blocks == TIER.num_blocks


def test_a_draft_model_has_no_host_tier(checkpoint: Path) -> None:
    with open_pair(
        str(checkpoint), str(checkpoint), {**GEOMETRY, "host_tier": TIER}, OPTIONS
    ) as loaded:
        assert executes_moves(loaded.model)
        assert not executes_moves(loaded.model._draft)  # type: ignore[attr-defined]
        engine = Engine(loaded.model, loaded.config)
        with_draft = [tokens_of(engine, index, PROMPTS[index % 4]) for index in range(8)]
        assert with_draft[:4] == with_draft[4:]


@pytest.mark.gpu
@pytest.mark.timeout(600)  # FlashInfer compiles its kernels at their first use
def test_a_start_on_a_gpu_finds_the_files_of_the_start_before(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Four prompts of three blocks, with graphs. In bf16 a token may depend on what is cached."""
    prompts = [tuple(3 + (i * j) % 300 for j in range(200)) for i in (7, 11, 13, 17)]
    geometry = {"num_blocks": 6, "block_size": 64, "max_model_len": 256}
    options = DeviceOptions(device="cuda", dtype="bfloat16")
    runs = [serve(checkpoint, tmp_path / "kv", prompts, options, **geometry) for _ in range(2)]
    assert runs[1].num_fetched >= 6, "of twelve, which the first run has stored"
    assert runs[1].keys >= runs[0].keys
    assert [len(tokens) for run in runs for tokens in run.tokens] == [4] * 16
