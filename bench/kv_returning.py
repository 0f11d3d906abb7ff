"""Time to the first token of a returning prefix on forge, from each tier that can have it.

Owns the options of the engine, its proof of tiers, and the phases of `forge bench kv returning`.
The requests are in bench/returning_prefix.py, what follows from the times in bench/kv_record.py.

    fill ──► cycles: miss, host, device ──► file_cached ──► file_cold
             └─ requests displace others ─┘ └ the last two with a folder; before each cycle
                                              Engine.resize empties both pools

Always true: only public calls are used. RequestOutput.cached_tokens says where tokens came from,
/proc/self/io whether files were read from storage.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from forge.bench.block_folder import BlockFolder, read_storage_bytes
from forge.bench.engine_driver import greedy, open_llm
from forge.bench.kv_plot import check_plot, write_plot
from forge.bench.kv_record import BENCHMARK, create_figures, shared_fields, show
from forge.bench.result_file import create_result, write_json
from forge.bench.returning_prefix import (
    LENGTHS,
    NEW_TOKENS,
    REPEATS,
    ReturningLoad,
    ReturningRun,
    Sample,
    create_load,
)
from forge.bench.shapes import has_no_weights, kv_bytes_per_token, model_folder
from forge.bench.workload import print_result, prompt_id_range
from forge.engine_options import Options
from forge.errors import InvalidConfig, RequestFailed
from forge.llm import LLM

FILE_LENGTHS = (1024, 2048, 4096, 8192, 16_384)
"""Lengths that are read from files: a cold file of a long prefix takes seconds."""

GIB = 2**30
DEFAULT_GIB = 16.0
HEADROOM = 1.25
"""Host memory and files have room for so many times the blocks of all prefixes."""

MAX_SETTLE_S = 60.0
SETTLE_TOKENS = 64
STORAGE_SHARES: Mapping[str, tuple[float, float]] = {
    "file_cached": (0.0, 0.1),
    "file_cold": (0.9, math.inf),
}
"""Tier of files -> least and most share of a prefix's bytes that is read from storage."""


class ForgeTiers(NamedTuple):
    """forge's LLM as a TierEngine."""

    llm: LLM
    ids: tuple[int, int]

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once. Returns seconds and tokens."""
        start_s = time.perf_counter()
        outputs = self.llm.generate(
            [prompt for prompt, _ in work], [greedy(output) for _, output in work], use_tqdm=False
        )
        seconds = time.perf_counter() - start_s
        for output, (_, tokens) in zip(outputs, work, strict=True):
            if len(output.token_ids) != tokens:
                raise RequestFailed(f"an output has {len(output.token_ids)} tokens, not {tokens}")
        return seconds, sum(len(each.token_ids) for each in outputs)

    def measure(self, prompt: list[int]) -> Sample:
        """Run one request for one token."""
        start_s = time.perf_counter()
        (output,) = self.llm.generate([prompt], greedy(1), use_tqdm=False)
        seconds = time.perf_counter() - start_s
        if len(output.token_ids) != 1:
            raise RequestFailed(f"an output ended by {output.finish_reason}")
        return Sample(seconds, output.cached_tokens._replace(written=0))


class CountedReads(NamedTuple):
    """A TierEngine whose samples have a problem if other bytes than these came from storage.

    bounds      least and most share of the prefix's bytes
    num_bytes   prompt -> bytes of its prefix
    """

    inner: ForgeTiers
    bounds: tuple[float, float]
    num_bytes: Callable[[list[int]], int]

    @property
    def ids(self) -> tuple[int, int]:
        """Range of the token ids of prompts, half-open."""
        return self.inner.ids

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once. Returns seconds and tokens."""
        return self.inner.run_batch(work)

    def measure(self, prompt: list[int]) -> Sample:
        """Run one request for one token."""
        before = read_storage_bytes()
        sample = self.inner.measure(prompt)
        after = read_storage_bytes()
        if before is None or after is None:
            return sample._replace(problem="this system does not count bytes read from storage")
        share = (after - before) / self.num_bytes(prompt)
        least, most = self.bounds
        if least <= share <= most:
            return sample
        return sample._replace(problem=f"{share:.0%} of the bytes were read from storage")


def parse_lengths(
    lengths: Sequence[int], max_model_len: int | None, option: str
) -> tuple[int, ...]:
    """Return the lengths that fit with their new tokens. Raises InvalidConfig if none does."""
    fitting = tuple(
        length
        for length in lengths
        if max_model_len is None or length + NEW_TOKENS + 1 <= max_model_len
    )
    if not fitting:
        raise InvalidConfig(
            option,
            f"none of {', '.join(map(str, lengths))} and {NEW_TOKENS} new tokens fits in "
            f"{max_model_len}",
            "Give shorter ones",
        )
    return fitting


def engine_options(model: str, load: ReturningLoad, options: Options) -> Options:
    """Return the options of the engine for the load: a small device and enough host memory.

    options   those of the caller, which replace the benchmark's
    """
    token_bytes = 4 if is_hash(model) else kv_bytes_per_token(model)
    num_bytes = token_bytes and HEADROOM * token_bytes * load.prefix_blocks * load.block_size
    gib = DEFAULT_GIB if not num_bytes else num_bytes / GIB
    chosen: Options = {
        "block_size": load.block_size,
        "num_blocks": load.num_blocks,
        "max_model_len": load.lengths[-1] + NEW_TOKENS + load.block_size,
        "max_num_seqs": 256,
        "kv_host_gib": gib,
        # Each tier is measured, the ones that a start would find slower than computing too.
        "kv_load_rule": "always",
    }
    if not is_hash(model) and has_no_weights(model):
        chosen["load_format"] = "dummy"
    chosen = {**chosen, **options, "num_blocks": load.num_blocks}
    if "kv_disk_path" in chosen:
        # A file has a header besides its block, which counts for small blocks.
        header_share = 2.0 if not token_bytes or token_bytes < 1024 else 1.1
        chosen.setdefault("kv_disk_gib", header_share * 4 * chosen["kv_host_gib"])
    return chosen


def is_hash(model: str) -> bool:
    """Return True for the deterministic model, whose blocks hold token ids."""
    return model.partition(":")[0] == "hash"


def check_room(llm: LLM, load: ReturningLoad) -> None:
    """Raise InvalidConfig unless the tiers have room for all prefixes."""
    tier = llm.engine.config.host_tier
    if tier is None or tier.num_blocks < load.prefix_blocks:
        found = 0 if tier is None else tier.num_blocks
        raise InvalidConfig(
            "kv_host_gib",
            f"host memory has {found} blocks, the prefixes have {load.prefix_blocks}",
            "Give more, or shorter lengths",
        )
    if tier.disk is not None and tier.disk.max_files < load.prefix_blocks:
        raise InvalidConfig(
            "kv_disk_gib",
            f"there is room for {tier.disk.max_files} files, the prefixes have "
            f"{load.prefix_blocks}",
            "Give more, or shorter lengths",
        )


def check_files(model: str, options: Options) -> None:
    """Raise InvalidConfig where files are measured and nothing says how large a block is."""
    if "kv_disk_path" in options and not is_hash(model) and kv_bytes_per_token(model) is None:
        raise InvalidConfig(
            "kv_disk_path",
            "nothing says how many bytes a block has: the model is no folder with a config.json",
            "Name the checkpoint's folder, or leave kv_disk_path out",
        )


class Reporter(NamedTuple):
    """Prints each entry of a run as soon as it is complete, and keeps it.

    about     engine and shape of all entries
    shared    further fields of all RESULT lines
    extra     length -> further fields of an entry
    """

    run: ReturningRun
    about: Mapping[str, Any]
    shared: Mapping[str, Any]
    extra: Callable[[int], Mapping[str, Any]]
    entries: list[dict[str, Any]]

    def report(self, *tiers: str) -> None:
        """Report the figures of these tiers."""
        for tier in tiers:
            for length in sorted(n for name, n in self.run.samples if name == tier):
                figures = {**self.about, **self.run.figures(tier, length), **self.extra(length)}
                self.entries.append(figures)
                print_result({"benchmark": BENCHMARK, **figures, **self.shared})


def measure_pools(run: ReturningRun, reporter: Reporter) -> None:
    """Measure misses, and hits of the device's pool and of host memory."""
    for _ in range(run.load.repeats):
        run.cycle()
    reporter.report("miss", "device", "host")


def measure_files(
    run: ReturningRun,
    reporter: Reporter,
    tiers: ForgeTiers,
    folder: BlockFolder,
    lengths: Sequence[int],
    token_bytes: int,
) -> None:
    """Measure hits of files: those that the page cache has, then those that are on storage alone.

    The pools are emptied before each cycle.
    """
    config = tiers.llm.engine.config
    assert config.host_tier is not None, "there is a folder"
    for tier, shares in STORAGE_SHARES.items():
        run.engine = CountedReads(tiers, shares, lambda p: (len(p) - NEW_TOKENS) * token_bytes)
        for _ in range(run.load.repeats):
            tiers.llm.engine.resize(num_blocks=1, num_host_blocks=0)
            run.displace_one_block()  # of a prefix, it would end what files are read for
            tiers.llm.engine.resize(config.num_blocks, config.host_tier.num_blocks)
            if tier == "file_cold":
                folder.drop_page_cache()
            for length in lengths:
                run.measure(tier, length)
        reporter.report(tier)


def settle_files(run: ReturningRun, folder: BlockFolder) -> None:
    """Decode until all prefixes are in files: an idle engine writes none."""
    start_s = time.perf_counter()
    while len(folder.names()) < run.load.prefix_blocks:
        if time.perf_counter() - start_s > MAX_SETTLE_S:
            run.show(f"{len(folder.names())} of {run.load.prefix_blocks} blocks are in files")
            return
        run.decode(SETTLE_TOKENS)
    run.show(f"{run.load.prefix_blocks} blocks are in files")


def measure_links(device: str, byte_counts: Sequence[int]) -> dict[int, float]:
    """Return GB/s of a plain pinned copy to the device, by its bytes; of a GiB for more."""
    import torch

    from forge.bench.kv_moves import measure_plain_copies

    speeds: dict[int, float] = {}
    for num_bytes in byte_counts:
        size = min(num_bytes, GIB)
        if size not in speeds:
            speeds[size] = measure_plain_copies(torch.device(device), size)["loads"]
    return {num_bytes: speeds[min(num_bytes, GIB)] for num_bytes in byte_counts}


def measure(
    llm: LLM, shape: str, model: str, load: ReturningLoad, file_lengths: Sequence[int], path: str
) -> list[dict[str, Any]]:
    """Return the entries of all tiers on an open LLM, printing each when it is complete.

    path   folder of files; empty: files are not measured
    """
    check_room(llm, load)
    tiers = ForgeTiers(llm, prompt_id_range(llm.engine.model.vocab_size()))
    run = ReturningRun(tiers, load)
    token_bytes = 4 if is_hash(model) else kv_bytes_per_token(model)
    speeds: dict[int, float] = {}
    if token_bytes and not is_hash(model):
        speeds = measure_links(llm.device, [token_bytes * length for length in load.lengths])

    def extra(length: int) -> dict[str, Any]:
        num_bytes = token_bytes and token_bytes * length
        found = {"prefix_bytes": num_bytes, "plain_copy_gb_s": speeds.get(num_bytes or 0)}
        return {name: value for name, value in found.items() if value}

    about = {"engine": "forge", "shape": shape}
    reporter = Reporter(run, about, shared_fields(), extra, [])
    run.fill()
    folder = BlockFolder(os.path.expanduser(path))
    if path:
        settle_files(run, folder)
    measure_pools(run, reporter)
    if path:
        assert token_bytes is not None, "check_files has refused it"
        measure_files(run, reporter, tiers, folder, file_lengths, token_bytes)
    return reporter.entries


def main(
    model: str,
    json_path: str | None,
    lengths: Sequence[int] = (),
    file_lengths: Sequence[int] = (),
    repeats: int = REPEATS,
    plot: str | None = None,
    options: Options | None = None,
) -> int:
    """Measure, print, and write record and plot. Returns 1 if tokens came from elsewhere.

    model          a shape's name, a checkpoint's folder, or an embedded model
    lengths        tokens of the prefixes; empty: LENGTHS
    file_lengths   those of them that are read from files too; empty: of FILE_LENGTHS
    options        of the LLM, besides those of the benchmark; files are measured in `kv_disk_path`
    """
    if plot is not None:
        check_plot(plot)
    options = options or Options()
    fitting = parse_lengths(lengths or LENGTHS, options.get("max_model_len"), "lengths")
    unknown = sorted({*file_lengths} - {*fitting})
    if unknown:
        raise InvalidConfig(
            "file_lengths", f"{unknown[0]} is none of the lengths", "Give some of them"
        )
    chosen = [n for n in fitting if n in (file_lengths or FILE_LENGTHS)] or [fitting[0]]
    block_size = options.get("block_size", 16 if is_hash(model) else 64)
    load = create_load(fitting, repeats, block_size, options.get("num_blocks"))
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        folder = model if is_hash(model) else model_folder(model, root)
        check_files(folder, options)
        llm, _, start_s = stack.enter_context(
            open_llm(folder, engine_options(folder, load, options))
        )
        shape = Path(model).name
        print(f"{shape}, started in {start_s} s; {load.num_blocks} blocks of {block_size} tokens")
        entries = measure(llm, shape, folder, load, chosen, options.get("kv_disk_path", ""))
    figures = create_figures(entries)
    show(figures)
    if json_path is not None:
        write_json(json_path, create_result(BENCHMARK, figures))
    if plot is not None:
        write_plot(plot, figures)
    return 1 if any("error" in each for each in entries) else 0
