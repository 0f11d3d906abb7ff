"""Eviction study: the share of prompt tokens that each rule finds in a pool of each size.

Owns the accesses of a workload and the replay of rules on them. Knows no concurrency: a request is
served alone, uses all its blocks, and leaves them in the cache.

    accesses     [a b c]   [a b d]   [a b c e] ...       chains of blocks, one a request
    first half   decides the parameter of each rule
    second half  is reported, with the cache that the first half has left

Always true: hits are a prefix of the chain. A block after a miss is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from forge.blocks import chain_hashes, root_hash
from forge.errors import InvalidConfig
from forge.request import Request
from forge.sim.eviction.offline import Accesses, Belady, EndedFirst
from forge.sim.eviction.rules import (
    AdaptiveLirs,
    Arc,
    Block,
    EvictionRule,
    GhostSecondTouch,
    Lirs,
    Lru,
    RandomAdmission,
    SecondTouch,
)
from forge.sim.fast_forward import run_fast_forward
from forge.sim.length_model import FILLER_TOKEN
from forge.sim.scenario import Scenario
from forge.sim.workloads.workload import RequestArrival, Workload
from forge.sim.world import World

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Parameters that the first half of the accesses decides between."""

CreateRule = Callable[[Accesses, int], EvictionRule]
"""(accesses, num_blocks) -> a rule with an empty cache. Only offline bounds read the accesses."""


def _with_shares(
    create: Callable[[int, float], EvictionRule],
) -> dict[float | None, CreateRule]:
    def create_rule(share: float, accesses: Accesses, num_blocks: int) -> EvictionRule:
        return create(num_blocks, share)

    return {share: partial(create_rule, share) for share in SHARES}


RULES: dict[str, dict[float | None, CreateRule]] = {
    "lru": {None: lambda accesses, num_blocks: Lru()},
    "random-admission": _with_shares(RandomAdmission),
    "second-touch": _with_shares(SecondTouch),
    "ghost-second-touch": _with_shares(GhostSecondTouch),
    "arc": {None: lambda accesses, num_blocks: Arc(num_blocks)},
    "lirs": _with_shares(Lirs),
    "adaptive-lirs": {None: lambda accesses, num_blocks: AdaptiveLirs(num_blocks)},
    "ended-first": {None: lambda accesses, num_blocks: EndedFirst(accesses)},
    "belady": {None: lambda accesses, num_blocks: Belady(accesses)},
}
"""Name of a rule -> its parameter, or None, -> a function that creates it.

The last two know the future.
"""


def replay_hits(rule: EvictionRule, accesses: Accesses, num_blocks: int) -> Iterator[int]:
    """Yield how many blocks each request finds. Raises InvalidConfig for a chain above the pool."""
    cached: set[Block] = set()
    for chain in accesses:
        if len(chain) > num_blocks:
            raise InvalidConfig(
                "blocks",
                f"{num_blocks} blocks do not hold a request of {len(chain)}",
                f"Give {max(map(len, accesses))} or more",
            )
        num_hits = 0
        while num_hits < len(chain) and chain[num_hits] in cached:
            num_hits += 1
        for block in chain:
            if block in cached:
                cached.remove(block)
                rule.remove(block)
        for _ in range(len(cached) + len(chain) - num_blocks):
            cached.remove(rule.evict())
        rule.add(chain, num_hits)
        cached.update(chain)
        yield num_hits


def hits(rule: str, accesses: Accesses, num_blocks: int, parameter: float | None = None) -> int:
    """Return the block hits of a rule of `RULES`, from an empty cache."""
    return sum(replay_hits(RULES[rule][parameter](accesses, num_blocks), accesses, num_blocks))


def belady_hits(accesses: Accesses, num_blocks: int) -> int:
    """Return the most block hits of any rule. See `forge.sim.eviction.offline`."""
    return hits("belady", accesses, num_blocks)


# Accesses of a workload.


@dataclass(frozen=True)
class AccessTrace:
    """The accesses of a workload.

    chains               blocks of prompt and answer, full ones only
    num_prompt_tokens    of each request
    block_size           tokens of a block
    """

    chains: list[Sequence[Block]]
    num_prompt_tokens: list[int]
    block_size: int

    def shared_tokens(self, index: int, num_hits: int) -> int:
        """Return the prompt tokens in the blocks found; at least one token is computed."""
        num_shareable = (self.num_prompt_tokens[index] - 1) // self.block_size
        return min(num_hits, num_shareable) * self.block_size


class ArrivalRecorder:
    """A workload that keeps its arrivals."""

    def __init__(self, workload: Workload) -> None:
        self.items: list[RequestArrival] = []
        self._workload = workload

    def arrivals(self) -> Iterator[RequestArrival]:
        for arrival in self._workload.arrivals():
            self.items.append(arrival)
            yield arrival

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Sequence[RequestArrival]:
        follow_ups = tuple(self._workload.follow_up_arrivals(request_id, now_ns))
        self.items += follow_ups
        return follow_ups


def read_accesses(scenario: Scenario) -> AccessTrace:
    """Return the accesses of a scenario, in order of arrival.

    A closed loop is simulated first, so its order is that of this engine and this policy.
    """
    recorder = ArrivalRecorder(scenario.create_workload()[0])
    if scenario.workload in ("agent", "closed"):
        engine, model = scenario.create_engine()
        run_fast_forward(World(engine, model, recorder), None)
        recorder.items.sort(key=lambda arrival: arrival.at_ns)
        requests: Iterator[Request] = (arrival.request for arrival in recorder.items)
    else:
        # A prompt may be long: each is freed before the next one is created.
        requests = (arrival.request for arrival in scenario.create_workload()[0].arrivals())
    return create_access_trace(requests, scenario.engine.block_size)


def create_access_trace(requests: Iterator[Request], block_size: int) -> AccessTrace:
    """Return the accesses of these requests; answers are those of a LengthModel.

    The last token of an answer is not computed.
    """
    trace = AccessTrace([], [], block_size)
    names: dict[bytes, int] = {}  # numbers take less memory than hashes
    for request in requests:
        num_output_tokens = request.params.max_tokens or 1
        tokens = (*request.prompt, *(FILLER_TOKEN,) * (num_output_tokens - 1))
        root = root_hash("", request.cache_salt, block_size)
        full = tokens[: len(tokens) // block_size * block_size]
        hashes = chain_hashes(root, full, block_size)
        trace.chains.append([names.setdefault(each, len(names)) for each in hashes])
        trace.num_prompt_tokens.append(len(request.prompt))
    return trace


# The comparison.


class RuleShare(NamedTuple):
    """Percent of the prompt tokens found, of the half that is reported.

    parameter   value that found most in the other half; None for a rule without one
    """

    rule: str
    num_blocks: int
    parameter: float | None
    percent: float


def compare_rules(trace: AccessTrace, num_blocks: int) -> Iterator[RuleShare]:
    """Yield the share of each rule in a pool of `num_blocks`, then that of an infinite pool."""
    half = len(trace.chains) // 2
    num_tokens = sum(trace.num_prompt_tokens[half:])
    if not half:
        raise InvalidConfig("requests", "there is nothing to report", "Give two requests or more")

    def shared_tokens(rule: EvictionRule, pool_blocks: int) -> tuple[int, int]:
        counts = replay_hits(rule, trace.chains, pool_blocks)
        sums = list(
            accumulate((trace.shared_tokens(*each) for each in enumerate(counts)), initial=0)
        )
        return sums[half], sums[-1] - sums[half]

    for name, parameters in RULES.items():
        found = {
            parameter: shared_tokens(create(trace.chains, num_blocks), num_blocks)
            for parameter, create in parameters.items()
        }
        best = max(found, key=lambda parameter: found[parameter][0])
        yield RuleShare(name, num_blocks, best, 100 * found[best][1] / num_tokens)
    all_blocks = sum(map(len, trace.chains))
    _, infinite = shared_tokens(Lru(), all_blocks)
    yield RuleShare("infinite", num_blocks, None, 100 * infinite / num_tokens)


def describe_pool(num_blocks: int, block_size: int) -> str:
    """Return the heading of the shares in a pool of this size."""
    return f"{num_blocks} blocks, {num_blocks * block_size} tokens"


def format_share(share: RuleShare) -> str:
    """Return the line of a rule: name, percent, and its parameter if it has one."""
    parameter = "" if share.parameter is None else f"  share {share.parameter}"
    return f"  {share.rule:20}{share.percent:6.2f} %{parameter}"
