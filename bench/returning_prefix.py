"""Returning prefixes: time to the first token by the tier that has the beginning of a prompt.

Owns the requests, their order and the proof of where tokens came from. Knows no engine: forge and
its peers run the same requests.

    fill     each prefix twice, then traffic that fills the device: prefixes go to host memory
    cycle    miss     unique prompts of each length: they displace all prefixes from the device
             host     each prefix with new tokens after it, from host memory
             device   the same prefix at once again, now on the device

Always true: a time counts for a tier only if every token of the prefix came from it. One sample
from elsewhere makes the entry an error, which has no figure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from forge.bench.workload import draw_prompts
from forge.errors import InvalidConfig
from forge.request import CachedTokens

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
NEW_TOKENS = 64
REPEATS = 5
SEED = 0

MAX_FILLS = 3
"""Most times that prefixes which are not in host memory yet are computed and displaced again."""

PRESSURE_SHARE = 10
"""Traffic that fills the device has one sequence for so many blocks. All of them may need their
next block in one plan: fewer than `min_clean_percent` of the device's blocks, which are free
without a loss."""

FILLER_TOKENS = 2048
"""Most tokens of a prompt whose only purpose is to displace others."""

EXPECTED: Mapping[str, Callable[[int], CachedTokens]] = {
    "miss": lambda length: CachedTokens(),
    "device": lambda length: CachedTokens(device=length),
    "host": lambda length: CachedTokens(host=length),
    "file_cached": lambda length: CachedTokens(disk=length),
    "file_cold": lambda length: CachedTokens(disk=length),
}
"""Tier -> tokens of the prefix -> where they must come from. The two of files differ in what the
page cache has."""


class Sample(NamedTuple):
    """Time of a request for one token, and where its prompt came from.

    tokens    of its prompt that were in a cache, by tier
    problem   another reason than `tokens` why it is no sample of its tier; None: there is none
    """

    seconds: float
    tokens: CachedTokens
    problem: str | None = None


class TierEngine(Protocol):
    """An engine with a prefix cache that has tiers, through its public API."""

    @property
    def ids(self) -> tuple[int, int]:
        """Range of the token ids of prompts, half-open."""
        ...

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once. Returns seconds and tokens."""
        ...

    def measure(self, prompt: list[int]) -> Sample:
        """Run one request for one token."""
        ...


class ReturningLoad(NamedTuple):
    """Prefixes of these lengths, on a device with room for `num_blocks` blocks.

    lengths   tokens of each prefix, multiples of block_size, ascending
    repeats   samples of each figure
    """

    lengths: tuple[int, ...]
    repeats: int
    block_size: int
    num_blocks: int

    @property
    def prefix_blocks(self) -> int:
        """Blocks of all prefixes."""
        return sum(self.lengths) // self.block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Return the blocks of so many tokens."""
        return -(-num_tokens // self.block_size)

    def groups(self) -> list[list[int]]:
        """Return the lengths in groups, each of which takes half of the device's blocks at most."""
        groups: list[list[int]] = []
        for length in reversed(self.lengths):
            if groups and self.blocks_of(sum(groups[-1]) + length) <= self.num_blocks // 2:
                groups[-1].append(length)
            else:
                groups.append([length])
        return groups


def create_load(
    lengths: Sequence[int], repeats: int, block_size: int, num_blocks: int | None = None
) -> ReturningLoad:
    """Return the load. Raises InvalidConfig for lengths that blocks cannot hold.

    num_blocks   None: twice the blocks of the longest request
    """
    ordered = tuple(sorted(dict.fromkeys(lengths)))
    for length in ordered:
        if length % block_size:
            raise InvalidConfig(
                "lengths",
                f"{length} is not a multiple of the block size {block_size}, so the end of the "
                "prefix could not be shared",
                f"Give {-(-length // block_size) * block_size}, say",
            )
    longest = -(-(ordered[-1] + NEW_TOKENS) // block_size) + 1
    num_blocks = num_blocks or 2 * longest
    if num_blocks < 2 * longest:
        raise InvalidConfig(
            "num_blocks",
            f"{num_blocks} blocks are less than twice the {longest} of the longest request",
            f"Give {2 * longest} or more, or shorter lengths",
        )
    return ReturningLoad(ordered, repeats, block_size, num_blocks)


class ReturningRun:
    """A run of the load on an engine: its prefixes, and the samples so far.

    samples   by tier and length
    """

    def __init__(self, engine: TierEngine, load: ReturningLoad) -> None:
        self.engine = engine
        self.load = load
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        self._rng = random.Random(SEED)
        self._prefixes = {length: self._draw(length) for length in load.lengths}
        self._start_s = time.perf_counter()

    def _draw(self, num_tokens: int) -> list[int]:
        return draw_prompts(self._rng, 1, (num_tokens, num_tokens), self.engine.ids)[0]

    def show(self, text: str) -> None:
        """Print a line with the seconds since the start of the run."""
        print(f"{time.perf_counter() - self._start_s:7.1f} s  {text}", flush=True)

    def _return(self, length: int) -> Sample:
        """Run the prefix of that length with new tokens after it."""
        return self.engine.measure(self._prefixes[length] + self._draw(NEW_TOKENS))

    def fill(self) -> None:
        """Bring all prefixes below the device, and show which are not there."""
        missing = set(self.load.lengths)
        for _ in range(MAX_FILLS):
            for group in self.load.groups():
                returning = [length for length in group if length in missing]
                for length in returning:
                    for _ in range(2):
                        self._return(length)
                if returning:
                    self._fill_device()
            self._displace(self.load.num_blocks)
            for length in self.load.lengths:
                sample = self._return(length)
                if sample.tokens == EXPECTED["host"](length):
                    missing.discard(length)
            self.show(f"filled; not in host memory: {sorted(missing) or 'none'}")
            if not missing:
                return

    def _fill_device(self) -> None:
        """Run sequences that grow together until they hold nearly all blocks of the device."""
        load, size = self.load, self.load.block_size
        target = load.num_blocks - max(1, load.num_blocks // 100)
        # None is longer than the longest request.
        longest = load.blocks_of(load.lengths[-1] + NEW_TOKENS)
        count = max(1, load.num_blocks // PRESSURE_SHARE, -(-target // max(1, longest - 1)))
        num_blocks, rest = divmod(target, count)
        output = max(1, (num_blocks - 1) * size + size // 2)
        prompts = [self._draw(size // 2 + size * (index < rest)) for index in range(count)]
        self.engine.run_batch([(prompt, output) for prompt in prompts])

    def _displace(self, num_blocks: int) -> None:
        """Run unique prompts that together take so many blocks."""
        size = self.load.block_size
        tokens = max(size, min(FILLER_TOKENS, self.load.lengths[-1]) // size * size)
        count = max(0, -(-num_blocks * size // tokens))
        if count:
            self.engine.run_batch([(self._draw(tokens), 1) for _ in range(count)])

    def cycle(self) -> None:
        """Take one sample of each length as a miss, from host memory and on the device."""
        load = self.load
        for length in load.lengths:
            self.add("miss", length, self.engine.measure(self._draw(length + NEW_TOKENS)))
        num_displaced = sum(load.blocks_of(length + NEW_TOKENS) for length in load.lengths)
        # A tenth more: which block goes first is the engine's choice.
        self._displace(load.num_blocks + load.num_blocks // 10 - num_displaced)
        for length in load.lengths:
            self.measure("host", length)
            self.measure("device", length)

    def decode(self, num_tokens: int) -> None:
        """Run one sequence of a unique prompt and so many tokens of output."""
        self.engine.run_batch([(self._draw(self.load.block_size), num_tokens)])

    def displace_one_block(self) -> None:
        """Run a unique prompt that takes one block, the only one of a pool that was made small."""
        self.engine.run_batch([(self._draw(self.load.block_size // 2), 1)])

    def measure(self, tier: str, length: int) -> None:
        """Take one sample of the prefix of that length, which should come from the tier."""
        self.add(tier, length, self._return(length))

    def add(self, tier: str, length: int, sample: Sample) -> None:
        """Keep a sample and show it."""
        self.samples.setdefault((tier, length), []).append(sample)
        problem = find_problem(tier, length, sample)
        self.show(
            f"{tier:<12}{length:>7} tokens{sample.seconds * 1e3:>10.2f} ms"
            + (f"   {problem}" if problem else "")
        )

    def figures(self, tier: str, length: int) -> dict[str, Any]:
        """Return the median, least and greatest time of a tier and length, or the error."""
        samples = self.samples[tier, length]
        about = {"tier": tier, "prefix_tokens": length, "samples": len(samples)}
        problems = [find_problem(tier, length, each) for each in samples]
        found = [each for each in problems if each is not None]
        if found:
            return {**about, "error": f"{len(found)} of {len(samples)} samples: {found[0]}"}
        times_ms = [round(each.seconds * 1e3, 3) for each in samples]
        return {
            **about,
            "ttft_ms": round(median(times_ms), 3),
            "ttft_ms_min": min(times_ms),
            "ttft_ms_max": max(times_ms),
        }


def find_problem(tier: str, length: int, sample: Sample) -> str | None:
    """Return why the sample is none of this tier, or None."""
    if sample.tokens != EXPECTED[tier](length):
        device, host, disk, _ = sample.tokens
        return f"{device} tokens came from the device, {host} from host memory, {disk} from files"
    return sample.problem
