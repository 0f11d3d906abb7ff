"""Eviction rules: bounds against brute force, LRU against BlockPool, and what each rule keeps."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from forge.blocks import BlockPool
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.request import Request, SamplingParams
from forge.sim.eviction.offline import Accesses
from forge.sim.eviction.rules import (
    Arc,
    Block,
    EvictionRule,
    GhostSecondTouch,
    Lirs,
    Lru,
    RandomAdmission,
    SecondTouch,
)
from forge.sim.eviction.study import (
    RULES,
    AccessTrace,
    belady_hits,
    compare_rules,
    create_access_trace,
    hits,
    read_accesses,
    replay_hits,
)
from forge.sim.scenario import Scenario
from forge.sim.workloads.traces import open_trace
from forge.sim.workloads.workload import RequestArrival

Chain = tuple[tuple[int, ...], ...]


def random_accesses(seed: int, num_requests: int, depth: int, width: int) -> list[Chain]:
    """Return chains of a random tree. A block is named by its path, as by a hash chain."""
    draws = random.Random(seed)
    accesses = []
    for _ in range(num_requests):
        path = tuple(draws.randrange(width) for _ in range(draws.randint(1, depth)))
        accesses.append(tuple(path[: end + 1] for end in range(len(path))))
    return accesses


def new_chains(first: int, count: int, length: int = 1) -> list[list[Block]]:
    """Return chains that share nothing with each other."""
    return [[(name, depth) for depth in range(length)] for name in range(first, first + count)]


def brute_force_hits(accesses: Accesses, num_blocks: int) -> int:
    """Return the most prefix hits over every choice of blocks to keep, at every request."""

    @cache
    def best(index: int, cached: frozenset[object]) -> int:
        if index == len(accesses):
            return 0
        chain = accesses[index]
        num_hits = 0
        while num_hits < len(chain) and chain[num_hits] in cached:
            num_hits += 1
        others = sorted(cached.difference(chain), key=repr)
        room = min(len(others), num_blocks - len(chain))
        return num_hits + max(
            best(index + 1, frozenset((*chain, *kept))) for kept in combinations(others, room)
        )

    return best(0, frozenset())


# Bounds.


@pytest.mark.parametrize("num_blocks", [3, 4, 5])
def test_belady_finds_as_many_blocks_as_the_best_of_all_choices(num_blocks: int) -> None:
    differs_from_lru = 0
    for seed in range(60):
        accesses = random_accesses(seed, num_requests=9, depth=3, width=2)
        assert belady_hits(accesses, num_blocks) == brute_force_hits(accesses, num_blocks), seed
        differs_from_lru += belady_hits(accesses, num_blocks) > hits("lru", accesses, num_blocks)
    assert differs_from_lru > 2


@pytest.mark.parametrize("num_blocks", [6, 20, 60])
def test_no_rule_finds_more_than_belady_and_belady_no_more_than_infinite(num_blocks: int) -> None:
    for seed in range(3):
        accesses = random_accesses(seed, num_requests=150, depth=6, width=3)
        bound = belady_hits(accesses, num_blocks)
        for name, parameters in RULES.items():
            for parameter in parameters:
                assert hits(name, accesses, num_blocks, parameter) <= bound, (seed, name)
        assert bound <= hits("lru", accesses, sum(map(len, accesses)))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_finds_everything_where_nothing_is_evicted(name: str) -> None:
    accesses = random_accesses(5, num_requests=80, depth=5, width=2)
    num_different = len({block for chain in accesses for block in chain})
    for parameter in RULES[name]:
        found = hits(name, accesses, num_different, parameter)
        assert found == sum(map(len, accesses)) - num_different


@pytest.mark.parametrize("seed", range(6))
def test_lru_finds_what_the_block_pool_finds(seed: int) -> None:
    accesses = random_accesses(seed, num_requests=200, depth=6, width=3)
    pool = BlockPool(num_blocks=25, block_size=1)
    found = []
    for seq_id, chain in enumerate(accesses):
        hashes = [repr(block).encode() for block in chain]
        shared = pool.lookup(hashes)
        found.append(len(shared))
        table = pool.open(seq_id, len(chain), shared)
        table.num_tokens = len(chain)
        for block, block_hash in zip(table.blocks, hashes, strict=True):
            pool.publish(block, block_hash)
        pool.release(seq_id)
    assert pool.num_evictions > 100
    assert list(replay_hits(Lru(), accesses, 25)) == found


def test_a_request_above_the_pool_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"2 blocks do not hold a request of 3\. Give 3"):
        belady_hits([[1], [1, 2, 3]], 2)


# What each rule keeps.


@pytest.mark.parametrize(
    ("rule", "num_hits"),
    [
        (Lru(), 0),
        (SecondTouch(8, 0.5), 3),
        (GhostSecondTouch(8, 0.5), 3),
        (Lirs(8, 0.5), 3),
        (Arc(8), 3),
    ],
    ids=["lru", "second-touch", "ghost-second-touch", "lirs", "arc"],
)
def test_reused_blocks_outlive_a_scan_of_new_ones(rule: EvictionRule, num_hits: int) -> None:
    prefix: list[Block] = [("system", depth) for depth in range(3)]
    accesses = [prefix, prefix, *new_chains(0, 20), prefix]
    assert list(replay_hits(rule, accesses, 8))[-1] == num_hits


@pytest.mark.parametrize(
    ("rule", "num_hits"),
    [(SecondTouch(6, 0.5), 0), (GhostSecondTouch(6, 0.5), 2), (Lirs(6, 0.5), 2)],
    ids=["second-touch", "ghost-second-touch", "lirs"],
)
def test_a_rule_with_memory_protects_blocks_that_are_computed_again(
    rule: EvictionRule, num_hits: int
) -> None:
    """The chain is evicted between its first two uses, so only its hashes can show the reuse."""
    chain: list[Block] = [("a", 0), ("a", 1)]
    accesses = [chain, *new_chains(0, 8), chain, *new_chains(100, 8), chain]
    found = list(replay_hits(rule, accesses, 6))
    assert (found[9], found[-1]) == (0, num_hits)


def test_random_admission_keeps_nothing_new_at_share_0_and_is_lru_at_share_1() -> None:
    accesses = random_accesses(3, num_requests=200, depth=6, width=3)
    assert hits("lru", accesses, 20) == sum(replay_hits(RandomAdmission(20, 1.0), accesses, 20))
    kept: list[list[Block]] = [[("a", 0)], *new_chains(0, 5), [("a", 0)]]
    assert sum(replay_hits(RandomAdmission(3, 0.0), kept, 3)) == 0
    assert sum(replay_hits(RandomAdmission(9, 0.0), kept, 9)) == 1


def test_known_ends_free_the_room_of_blocks_that_are_never_used_again() -> None:
    session: list[Block] = [("a", 0), ("a", 1)]
    accesses = [session, *new_chains(0, 20), session]
    assert (hits("lru", accesses, 4), hits("ended-first", accesses, 4)) == (0, 2)


def test_adaptive_lirs_gains_on_a_loop_that_lru_misses_entirely() -> None:
    loop = new_chains(0, 120) * 40
    assert hits("lru", loop, 100) == 0
    assert hits("adaptive-lirs", loop, 100) > 0.4 * len(loop)
    assert belady_hits(loop, 100) > 0.8 * len(loop)


def test_adaptive_lirs_stays_near_lru_where_each_block_is_used_twice() -> None:
    """LIRS keeps blocks for a third use that never comes; LRU finds all second uses."""
    accesses = used_twice(40, 3000)
    found = {
        name: hits(name, accesses, 100, 0.9 if name == "lirs" else None)
        for name in ("lru", "lirs", "adaptive-lirs")
    }
    assert found["lru"] == 2960
    assert found["lirs"] < 0.1 * found["lru"]
    assert found["adaptive-lirs"] > 0.95 * found["lru"]


@pytest.mark.parametrize(("num_between", "num_hits"), [(39, 1), (40, 0)])
def test_uses_of_four_times_the_blocks_of_the_pool_are_remembered(
    num_between: int, num_hits: int
) -> None:
    """A block whose first use is remembered is protected at its second, and outlives a scan."""
    block: list[Block] = [("a", 0)]
    accesses = [block, *new_chains(0, num_between), block, *new_chains(100, 20), block]
    assert list(replay_hits(Lirs(10, 0.5), accesses, 10))[-1] == num_hits


def test_a_chain_is_compared_with_protected_blocks_of_other_requests() -> None:
    """Room for one protected block: it goes from x to the first block of the chain, not the last.

    The last block is added first. It must not be the oldest protected block of the others.
    """
    chain: list[Block] = [("a", 0), ("a", 1)]
    x: list[Block] = [("x", 0)]
    accesses = [x, x, chain, chain, *new_chains(0, 3), chain]
    assert list(replay_hits(Lirs(4, 0.25), accesses, 4))[-1] == 1


def used_twice(distance: int, count: int) -> list[list[Block]]:
    """Return accesses to `count` blocks. Each is used again `distance` blocks later."""
    accesses = []
    for name in range(count):
        accesses += new_chains(name, 1)
        if name >= distance:
            accesses += new_chains(name - distance, 1)
    return accesses


def test_arc_gives_room_to_new_blocks_and_takes_it_back() -> None:
    """The first phase reuses each block once; the second reuses 30 blocks between scans."""
    first, hot = used_twice(40, 1000), new_chains(5000, 30)
    second = [each for lap in range(40) for each in (*hot, *new_chains(6000 + 90 * lap, 90))]
    found = list(replay_hits(Arc(100), [*first, *second], 100))
    assert sum(found[: len(first)]) > 0.9 * hits("lru", first, 100)
    assert sum(found[len(first) :]) > 0.9 * 40 * len(hot)
    assert hits("lru", second, 100) == 0


# Accesses of a workload.


def request(request_id: int, prompt: tuple[int, ...], output: int, salt: str = "") -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(request_id, prompt, params, cache_salt=salt)


def test_a_chain_has_the_full_blocks_of_prompt_and_answer() -> None:
    """Blocks of four: 6 tokens and 6 of output fill two, as the last token is not computed."""
    first = request(0, (1, 2, 3, 4, 5, 6), 6)
    other = request(1, (1, 2, 3, 4, 9), 1)
    salted = request(2, (1, 2, 3, 4), 1, salt="b")
    trace = create_access_trace(iter([first, other, salted]), block_size=4)
    assert [len(chain) for chain in trace.chains] == [2, 1, 1]
    assert trace.chains[0][0] == trace.chains[1][0] != trace.chains[2][0]
    assert trace.num_prompt_tokens == [6, 5, 4]


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    trace = AccessTrace([], [8, 9], block_size=4)
    assert (trace.shared_tokens(0, 2), trace.shared_tokens(1, 2)) == (4, 8)


def test_accesses_of_agents_are_their_turns_in_order_of_arrival() -> None:
    scenario = Scenario(
        workload="agent", clients=2, requests=8, turns=4, system=64, prompt="64", output="33"
    )
    trace = read_accesses(scenario)
    assert trace.num_prompt_tokens == [128, 128, 225, 225, 322, 322, 419, 419]
    for turn in (0, 2, 4):
        for session in (0, 1):
            chain, longer = trace.chains[turn + session], trace.chains[turn + 2 + session]
            assert longer[: len(chain)] == chain
    infinite = hits("lru", trace.chains, 10_000)
    assert infinite == sum(map(len, trace.chains[:6])) + 4  # 4: the system prompt of the second


def test_the_second_half_is_reported_and_the_first_decides_the_parameter() -> None:
    """A loop needs a large protected share; blocks that are used twice need a small one."""
    loop, twice = new_chains(0, 120) * 5, used_twice(40, 320)
    trace = AccessTrace([*loop, *twice], [3] * 2 * len(loop), block_size=2)
    assert len(loop) == len(twice)
    shares = {share.rule: share for share in compare_rules(trace, 100)}
    assert shares["lirs"].parameter == 0.9
    assert shares["lru"].parameter is None
    # 280 of 600 blocks were used before; two of three tokens are in the block.
    assert shares["lru"].percent == pytest.approx(100 * 280 / 600 * 2 / 3)
    assert shares["lirs"].percent < shares["lru"].percent < shares["infinite"].percent


def test_accesses_with_pauses_are_in_the_order_in_which_the_engine_receives_them() -> None:
    class Arrivals:
        """Keeps the lengths of prompts in order."""

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
            self.lengths.append(len(arrival.request.prompt))

        def on_disconnect(self, request_id: int, now_ns: int) -> None: ...

        def on_step(self, step: object, deltas: object, now_ns: int) -> None: ...

    scenario = Scenario(workload="agent", clients=5, requests=30, turns=6, pause=2.0)
    arrivals = Arrivals()
    scenario.run(create_observers=lambda engine: [arrivals])
    assert read_accesses(scenario).num_prompt_tokens == arrivals.lengths


def test_the_command_prints_and_writes_every_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shares.json"
    words = "agent --clients 4 --requests 40 --turns 5 --blocks 400,5000".split()
    assert main(["sim", "eviction", *words, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = json.loads(file.read_text())["shares"]
    assert [(each["rule"], each["num_blocks"]) for each in shares] == [
        (name, num_blocks) for num_blocks in (400, 5000) for name in (*RULES, "infinite")
    ]
    assert lines[1] == "400 blocks, 6400 tokens"
    assert len({each["percent"] for each in shares[len(RULES) + 1 :]}) == 1  # nothing is evicted
    assert lines[2] == f"  lru                 {shares[0]['percent']:6.2f} %"
    assert shares[0]["percent"] < shares[len(RULES) - 1]["percent"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("agent", "--blocks: no size of the pool is given. Give --blocks 1000"),
        ("agent --blocks x", "--blocks: 'x' is not a list of numbers. Give 10,20, say"),
        ("nowhere --blocks 9", "TRACE: 'nowhere' is no workload and no file. Use poisson, "),
        (
            "agent --requests 1 --turns 1 --blocks 99",
            "--requests: there is nothing to report. Give two",
        ),
    ],
)
def test_an_invalid_comparison_is_refused(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "eviction", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"forge sim eviction: {line}")


@pytest.mark.parametrize(
    ("num_blocks", "lru", "belady"), [(390, 4.0, 9.5), (1607, 4.8, 22.2), (3027, 6.5, 28.4)]
)
def test_block_hits_of_a_public_trace(num_blocks: int, lru: float, belady: float) -> None:
    """Percent of all blocks of prompts; 1607 blocks are the KV cache of a 4B model on an H200."""
    file = Path(os.environ.get("FORGE_TRACES", "")) / "mooncake_conversation.public.jsonl"
    if not file.is_file():
        pytest.skip(f"FORGE_TRACES names no folder with {file.name}")
    accesses = [request.blocks for request in open_trace(file)]
    num_accesses = sum(map(len, accesses))
    assert 100 * hits("lru", accesses, num_blocks) / num_accesses == pytest.approx(lru, abs=0.05)
    found = 100 * belady_hits(accesses, num_blocks) / num_accesses
    assert found == pytest.approx(belady, abs=0.05)
