"""Exploration: every state of tiny worlds, planted bugs, and the soundness of merging states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Waiting
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest

from forge import scheduler as scheduler_module
from forge.blocks import BlockPool, BlockTable
from forge.cli.main import main
from forge.commit_gate import CommitGate
from forge.errors import InvalidConfig
from forge.host_cache import HostCache
from forge.policy import FCFS, POLICIES, Candidate, Policy, PolicyContext
from forge.prefix_cache import PrefixCache
from forge.request import Delta
from forge.scheduler import Scheduler
from forge.seam import Row, RowOutput, StepOutput, StepPlan
from forge.sequence import Sequence
from forge.sessions import Session, SessionTable
from forge.sim.exploration import search as search_module
from forge.sim.exploration.canonical import Canonicaliser
from forge.sim.exploration.drawing import draw
from forge.sim.exploration.graph import StateGraph
from forge.sim.exploration.search import LIVELOCK, STARVATION, Counterexample, Report, Search
from forge.sim.exploration.snapshots import BATCH_SIZE, Frontier, Snapshots
from forge.sim.exploration.world import (
    ADD,
    COMMIT,
    GO,
    RESET,
    SCHEDULE,
    Action,
    State,
    TinyWorld,
    check,
    create_state,
    perform,
    possible_actions,
)
from forge.sim.exploration.worlds import find_world


def explore(name: str, depth: int, policy: Policy = FCFS, max_states: int = 100_000) -> Report:
    return Search(find_world(name, depth), policy).run(max_states)


def path_of(report: Report) -> list[str]:
    assert report.counterexample is not None
    return [str(action) for action in report.counterexample.path]


def cycle_of(report: Report) -> list[str]:
    assert report.counterexample is not None
    return [str(action) for action in report.counterexample.cycle]


# Whole worlds.

REACHES = {
    "pair": ("preempted", "prefix hit", "resumed", "void", "abort", "reset"),
    "lengths": ("preempted", "prefix hit", "resumed"),
    "forks": ("forked", "copied", "prefix hit", "resumed"),
    "priorities": ("preempted", "prefix hit", "void"),
    "exempt": ("preempted", "resumed"),
    "structure": ("prefix hit", "resumed", "reset"),
    "resize": ("preempted", "prefix hit", "resize"),
    "host": ("stored", "loaded", "prefix hit", "resumed", "void", "abort", "reset"),
    "host-filter": ("stored", "loaded", "prefix hit", "resumed", "void", "abort"),
    "host-busy": ("stored", "loaded", "prefix hit", "abort"),
}
"""World -> what must happen in it."""

NUM_STATES = {
    ("pair", 1): 948,
    ("pair", 2): 3072,
    ("lengths", 1): 1765,
    ("lengths", 2): 3023,
    ("forks", 1): 905,
    ("forks", 2): 1759,
    ("priorities", 1): 3862,
    ("priorities", 2): 18001,
    ("exempt", 1): 394,
    ("exempt", 2): 779,
    ("structure", 1): 1923,
    ("structure", 2): 3311,
    ("resize", 1): 2802,
    ("resize", 2): 6012,
    ("host", 1): 1547,
    ("host", 2): 2485,
    ("host-filter", 1): 7860,
    ("host-filter", 2): 14745,
    ("host-busy", 1): 6852,
    ("host-busy", 2): 13568,
}
"""World, depth -> its states under FCFS. A change of the scheduler's decisions changes them."""

QUICK = (("exempt", 1),)


def marks(name: str, depth: int) -> pytest.MarkDecorator:
    """Return the mark of a world: soak for a large one, unless it reaches the most events."""
    is_large = NUM_STATES[name, depth] > 2_500 and name != "pair"
    return pytest.mark.soak if is_large else pytest.mark.long


@pytest.mark.parametrize(
    ("name", "depth"),
    [each if each in QUICK else pytest.param(*each, marks=marks(*each)) for each in NUM_STATES],
)
def test_every_state_of_a_world_is_right_and_every_request_ends(name: str, depth: int) -> None:
    report = explore(name, depth)
    assert report.counterexample is None and report.is_complete
    assert report.num_states == NUM_STATES[name, depth]
    assert [event for event in REACHES[name] if not report.reached[event]] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "depth", "max_states"),
    [
        ("lengths", 2, 700),
        ("priorities", 2, 700),
        ("structure", 2, 700),
        ("resize", 2, 1200),
        ("host-filter", 1, 2000),
        ("host-busy", 1, 3500),
    ],
)
def test_the_first_states_of_a_large_world_are_right(
    name: str, depth: int, max_states: int
) -> None:
    """Among them are those after each event that the world is about."""
    report = explore(name, depth, max_states=max_states)
    assert report.counterexample is None and report.num_drained
    assert [event for event in REACHES[name] if not report.reached[event]] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pair", marks=pytest.mark.soak),
        pytest.param("lengths", marks=pytest.mark.long),
        pytest.param("priorities", marks=pytest.mark.soak),
    ],
)
def test_the_largest_victim_starves_no_request(name: str) -> None:
    report = explore(name, 2, POLICIES["largest-victim"])
    assert report.counterexample is None and report.is_complete and report.reached["preempted"]


# Starvation.


def test_short_prompts_starve_a_long_one() -> None:
    report = explore("lengths", 1, POLICIES["shortest-prompt"], max_states=300)
    assert path_of(report) == ["add 1"]
    assert cycle_of(report) == ["add 0", "add 0", "schedule", "commit end end"]
    assert report.counterexample is not None and report.counterexample.error == STARVATION


def test_prompts_that_go_first_starve_a_decode() -> None:
    report = explore("pair", 1, POLICIES["prefill-first"], max_states=300)
    assert path_of(report) == ["add 0", "schedule", "commit go"]
    assert cycle_of(report) == ["add 0", "schedule", "commit end"]


def admit_all_but_request_1(
    waiting: Waiting[Candidate], context: PolicyContext
) -> Candidate | None:
    return next((c for c in waiting if c.request.id != 1), None)


def test_a_policy_that_never_admits_a_request_is_found_when_nothing_else_is_left() -> None:
    policy = FCFS._replace(admit=admit_all_but_request_1)
    report = explore("lengths", 1, policy)
    assert path_of(report) == ["add 1", "schedule"]
    assert report.counterexample is not None
    assert report.counterexample.error.startswith("PolicyError: 1 requests wait, 0 run")


# Planted bugs: the shortest counterexample of each.

Plant = Callable[[pytest.MonkeyPatch], None]


def free_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def release_twice(self: BlockPool, seq_id: int) -> None:
        blocks = list(self.tables[seq_id].blocks)
        release(self, seq_id)
        self.free(blocks[:1])

    patch.setattr(BlockPool, "release", release_twice)


def publish_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    plan_rows = Scheduler._plan_rows

    def plan_and_publish(
        self: Scheduler, rows: list[Row], late_rows: list[int], blocked: set[int]
    ) -> None:
        plan_rows(self, rows, late_rows, blocked)
        for s in self.running.values():
            end = min(s.table.num_tokens, len(s.tokens))
            self.prefix_cache.publish(s, s.num_committed, end)

    patch.setattr(Scheduler, "_plan_rows", plan_and_publish)


def forget_the_epoch(patch: pytest.MonkeyPatch) -> None:
    commit_row = Scheduler._commit_row

    def commit_any_epoch(
        self: Scheduler, sequence: Sequence, row: Row, result: RowOutput, deltas: list[object]
    ) -> None:
        commit_row(self, sequence, row._replace(epoch=sequence.epoch), result, deltas)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_commit_row", commit_any_epoch)


def lose_a_request_at_void(patch: pytest.MonkeyPatch) -> None:
    enqueue = Scheduler._enqueue

    def enqueue_new(self: Scheduler, sequence: Sequence) -> None:
        if not sequence.was_retried:
            enqueue(self, sequence)

    patch.setattr(Scheduler, "_enqueue", enqueue_new)


def ignore_the_limit_of_preemptions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_module, "MAX_PREEMPTIONS", 1000)


def evict_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share

    def share_and_keep_in_cache(self: BlockPool, blocks: list[int]) -> None:
        cached = [block for block in blocks if block in self._cached_blocks]
        share(self, blocks)
        self._cached_blocks.update(dict.fromkeys(cached))

    patch.setattr(BlockPool, "share", share_and_keep_in_cache)


def leak_a_slot(patch: pytest.MonkeyPatch) -> None:
    stop_running = Scheduler._stop_running

    def stop_and_keep_the_slot(self: Scheduler, sequence: Sequence) -> None:
        stop_running(self, sequence)
        self._free_slots.pop()

    patch.setattr(Scheduler, "_stop_running", stop_and_keep_the_slot)


def leave_blocks_in_progress(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "remove_in_progress", lambda self, sequence: None)


def admit_while_a_token_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_must_wait", lambda self, sequence: False)


def plan_past_a_grammar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_module, "collect_late_masks", lambda plan, sequences: ())


def write_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_is_read_only", lambda self, block: block in self._hash_by_block)


def keep_blocks_that_a_resize_removes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "resize", lambda self, num_blocks: self.pool.resize(num_blocks))


def keep_cached_blocks_at_a_reset(patch: pytest.MonkeyPatch) -> None:
    def forget_hashes(self: BlockPool) -> None:
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    patch.setattr(BlockPool, "reset_cache", forget_hashes)


FIRST_STEP = ("add 0", "schedule")

PLANTED: list[tuple[Plant, str, str, tuple[str, ...]]] = [
    (free_a_block_twice, "pair", "is not held", (*FIRST_STEP, "commit end")),
    (publish_before_the_commit, "pair", "writes into published block 0", FIRST_STEP),
    (
        forget_the_epoch,
        "pair",
        "zip()",
        (
            *("add 0", "schedule", "commit go", "add 0", "schedule", "schedule"),
            *("commit go go", "schedule", "commit go go"),
        ),
    ),
    (lose_a_request_at_void, "pair", "assert live ==", (*FIRST_STEP, "void")),
    (
        evict_shared_blocks,
        "pair",
        "[*free, *cached, *references]",
        (*FIRST_STEP, "commit end", *FIRST_STEP),
    ),
    (leak_a_slot, "pair", "_free_slots", (*FIRST_STEP, "commit end")),
    (leave_blocks_in_progress, "pair", "and does not run", (*FIRST_STEP, "abort 0")),
    (
        admit_while_a_token_is_in_flight,
        "resize",
        "row.refs",
        (
            *("add 1", "add 0", "schedule", "schedule", "commit go go"),
            *("abort 1", "resize 3", "schedule"),
        ),
    ),
    (
        plan_past_a_grammar,
        "structure",
        "late_masks",
        (*FIRST_STEP, "schedule", "commit go", "schedule"),
    ),
    (
        write_to_shared_blocks,
        "forks",
        "writes into shared block 0",
        (*FIRST_STEP, "commit go", "reset", "schedule"),
    ),
    (
        keep_blocks_that_a_resize_removes,
        "resize",
        "BlocksInUse: cannot shrink to 3 blocks",
        ("add 1", "add 0", "schedule", "schedule", "resize 3"),
    ),
    (
        keep_cached_blocks_at_a_reset,
        "pair",
        "KeyError: 0",
        (*FIRST_STEP, "schedule", "commit go", "void", "reset"),
    ),
]
"""Bug, world, part of the error, shortest path."""


@pytest.mark.parametrize(
    ("plant", "name", "error", "path"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_planted_bug_is_found_by_its_shortest_path(
    plant: Plant, name: str, error: str, path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = explore(name, 2)
    assert report.counterexample is not None and error in report.counterexample.error
    assert tuple(path_of(report)) == path


@pytest.mark.long
def test_a_ninth_preemption_is_found_116_actions_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_the_limit_of_preemptions(monkeypatch)
    report = explore("exempt", 2)
    assert report.counterexample is not None
    assert "s.num_preemptions <= min(ALLOWED_PREEMPTIONS" in report.counterexample.error
    assert len(path_of(report)) == 116


def retry_every_step(patch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong in any state: each commit preempts what runs, and all is computed again."""

    def preempt_all(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
        self.ledger.clear()
        for sequence in list(self.running.values()):
            self._preempt(sequence, "retried")
        return []

    patch.setattr(Scheduler, "commit", preempt_all)


def test_a_step_that_is_retried_without_end_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    retry_every_step(monkeypatch)
    report = explore("exempt", 1)
    assert report.counterexample is not None and report.counterexample.error == LIVELOCK
    assert (path_of(report), cycle_of(report)) == (
        ["add 0", "schedule", "commit go"],
        ["schedule", "commit go"],
    )


def test_a_livelock_is_found_after_states_that_were_not_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retry_every_step(monkeypatch)
    report = explore("exempt", 1, max_states=2)
    assert report.num_expanded == 1
    assert report.counterexample is not None and report.counterexample.error == LIVELOCK
    assert path_of(report) == ["add 0", "schedule", "commit go", "schedule", "commit go"]


# Canonical states.


def merged_states(
    world: TinyWorld, canonical: Canonicaliser, max_states: int
) -> Iterator[tuple[State, State]]:
    """Yield states of equal forms: the first one found, and a later one."""
    snapshots, first = Snapshots(), create_state(world, FCFS)
    found = {canonical.digest(first.scheduler): snapshots.save(first)}
    queue = list(found.values())
    for snapshot in queue:
        for action in possible_actions(world, snapshots.load(snapshot)):
            state = snapshots.load(snapshot)
            perform(world, state, action)
            digest = canonical.digest(state.scheduler)
            if digest in found:
                yield snapshots.load(found[digest]), state
            elif len(found) < max_states:
                found[digest] = snapshots.save(state)
                queue.append(found[digest])


def names(state: State) -> tuple[object, ...]:
    """Return names that a form leaves out: ids of sequences, requests, blocks and plans."""
    s = state.scheduler
    tables = [(i, table.blocks) for i, table in s.pool.tables.items()]
    steps = [plan.step for plan in s.ledger]
    sessions = [(x.key, x.last_turn, x.paused_at, x.num_turns) for x in s.sessions.values()]
    free = s.pool.free_blocks
    return (list(s.sequences), list(s.requests), tables, free, steps, sessions, s.session_tips)


def walk(
    world: TinyWorld, canonical: Canonicaliser, one: State, other: State, draws: Random
) -> list[str]:
    """Perform the same 12 random actions in both; return those up to the first difference."""
    path: list[str] = []
    for _ in range(12):
        actions = list(possible_actions(world, one))
        if list(possible_actions(world, other)) != actions:
            return [*path, "other actions are possible"]
        action = draws.choice(actions)
        path.append(str(action))
        plans = [perform(world, state, action) for state in (one, other)]
        check(one)
        check(other)
        if plans.count(None) == 1 or canonical.form(one.scheduler) != canonical.form(
            other.scheduler
        ):
            return path
    return []


@pytest.mark.parametrize(
    "name",
    [
        "resize",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("pair", "forks", "priorities")),
        pytest.param("structure", marks=pytest.mark.long),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("host", "host-filter", "host-busy")),
    ],
)
def test_states_that_are_merged_have_equal_futures(name: str) -> None:
    world, draws = find_world(name, 2), Random(1)
    num_renamed = 0
    canonical = Canonicaliser(world)
    for one, other in merged_states(world, canonical, 250):
        if names(one) != names(other) and draws.random() < 0.1:
            num_renamed += 1
            assert walk(world, canonical, one, other, draws) == []
    assert num_renamed > 10


def test_a_row_that_awaits_its_mask_is_in_the_form() -> None:
    """The same row is planned ahead of the token before, or after it. Only ahead it is late."""
    world = find_world("structure", 2)
    ahead, after = create_state(world, FCFS), create_state(world, FCFS)
    schedule, commit = Action(SCHEDULE), Action(COMMIT, outcomes=(GO,))
    for state, actions in (
        (ahead, (schedule, schedule, commit)),
        (after, (schedule, commit, schedule)),
    ):
        for action in (Action(ADD, 0), *actions):
            perform(world, state, action)
    assert [state.scheduler.ledger[0].late_rows for state in (ahead, after)] == [(0,), ()]
    forms = [Canonicaliser(world).form(state.scheduler) for state in (ahead, after)]
    assert forms[0] != forms[1]


class FormWithoutOrder(Canonicaliser):
    """A form that lacks which cached block is evicted next."""

    def form(self, scheduler: Scheduler) -> tuple[object, ...]:
        parts = list(super().form(scheduler))
        parts[-2] = tuple(sorted(parts[-2]))
        return tuple(parts)


def test_a_form_without_the_order_of_cached_blocks_merges_states_with_other_futures() -> None:
    world, draws = find_world("lengths", 2), Random(1)
    whole, partial = Canonicaliser(world), FormWithoutOrder(world)
    assert any(
        walk(world, partial, one, other, draws)
        for one, other in merged_states(world, partial, 400)
        if whole.form(one.scheduler) != whole.form(other.scheduler)
    )


IN_FORM = {
    Scheduler: "pool prefix_cache waiting running sequences requests gate ledger _prefilling "
    "_free_slots host_cache policy_calls sessions _session_table _is_stalled num_planned_tokens "
    "next_step",
    BlockPool: "num_blocks tables _empty_blocks _cached_blocks _protected_blocks _hash_by_block "
    "_dirty _dirty_cached_blocks _dirty_protected_blocks",
    HostCache: "_free_blocks _hash_by_block _unpinned_blocks _redundant_blocks _storing _to_load "
    "_num_planned _touched_once _reused_hashes",
    PrefixCache: "blocks_in_progress",
    CommitGate: "sequences",
    Sequence: "id request choice tokens max_len table slot num_synced_blocks epoch num_preemptions "
    "was_retried num_committed next_prompt_logprob hashes num_drafts inspect_from "
    "num_overtaken num_shared_tokens num_served_before session",
    BlockTable: "blocks num_tokens",
    SessionTable: "sessions tips used_by_others",
    Session: "key num_turns num_live num_tokens chain num_foreign_blocks paused_at "
    "expected_pause_s has_ended",
}
"""Fields that the canonical form has, under another name or by their order."""

NOT_IN_FORM = {
    # Constants of a world. The log of KV events is None, and only written otherwise.
    Scheduler: "config drafter disk_cache _has_host_tier _vocab_size _end_ids _create_stop_checker "
    "_create_matcher _acceptance _kv_events "
    # Statistics and events, and numbers whose order alone matters.
    "num_queried_tokens num_uncached_tokens num_preemptions num_draft_tokens "
    "num_accepted_tokens cached_tokens resumed_tokens num_loaded_tokens new_request_ids "
    "num_recomputed_tokens "
    "wait_reasons _admitted_events _preempted_events "
    # No world pauses, or updates weights.
    "is_frozen "
    "_finished_events _next_seq_id",
    # Protected hashes are those of chains. _ref_counts and _block_by_hash follow from the others.
    BlockPool: "block_size num_evictions num_copies peak_used_blocks _ref_counts _block_by_hash "
    "_protected_hashes _kv_events",
    # Pins and reserved hashes follow from loads and stores. No world has files, or another size.
    HostCache: "num_blocks num_stored_blocks num_loaded_blocks num_evictions _tier _pool "
    "_block_by_hash _pins _reserved_hashes unspilled_blocks _kv_events",
    PrefixCache: "_config _pool _host_cache _kv_events namespace",
    CommitGate: "",
    # row_index is where a plan in flight has the sequence's row.
    Sequence: "params bind stop_ids stop_checker matcher row_index cached_tokens "
    "num_lost_positions num_recomputed num_counted_blocks",
    BlockTable: "capacity",
    # Counts that follow from the sessions, and those that an action takes away.
    SessionTable: "_pool _max_sessions _on_close _by_tenant _num_chains _num_hashes num_paused "
    "_paused "
    # Its values are read in equality with `last_turn` alone: the timer of the last turn counts.
    "_num_requests",
    Session: "last_turn num_served_tokens",
}
"""Fields that are constant in a world, follow from others, or decide nothing."""


def test_every_field_of_the_state_is_in_the_form_or_known_to_decide_nothing() -> None:
    """A new field of the core is added here, and to Canonicaliser where a decision reads it."""
    scheduler = create_state(find_world("pair", 1), FCFS).scheduler
    table = SessionTable(scheduler.pool, 1, print)
    owners: tuple[object, ...] = (scheduler, scheduler.pool, scheduler.prefix_cache, table)
    owners += (scheduler.gate, scheduler.host_cache)
    found: dict[type, set[str]] = {type(each): set(vars(each)) for each in owners}
    dataclasses = (Sequence, BlockTable, Session)
    found |= {each: {field.name for field in fields(each)} for each in dataclasses}
    assert found == {each: set(f"{IN_FORM[each]} {NOT_IN_FORM[each]}".split()) for each in IN_FORM}


# Copies.


def test_a_copy_has_the_same_form_and_shares_nothing_that_changes() -> None:
    world, snapshots = find_world("pair", 2), Snapshots()
    canonical, state = Canonicaliser(world), create_state(world, FCFS)
    for action in (Action(ADD, 0), Action(SCHEDULE), Action(COMMIT, outcomes=(GO,))):
        perform(world, state, action)
    form = canonical.form(state.scheduler)
    snapshot = snapshots.save(state)
    for action in possible_actions(world, state):
        copy = snapshots.load(snapshot)
        assert canonical.form(copy.scheduler) == form
        assert copy.scheduler.policy is FCFS and copy.scheduler.config is world.config
        perform(world, copy, action)
        assert canonical.form(copy.scheduler) != form
        assert canonical.form(state.scheduler) == form


def test_a_frontier_is_first_in_first_out_across_compressed_batches() -> None:
    frontier, pushed, popped = Frontier(), 0, []
    for size in (3, BATCH_SIZE * 5, 1):
        for _ in range(size):
            frontier.push(bytes([pushed % 251]) * (pushed % 7), pushed * 50)
            pushed += 1
        popped += [frontier.pop() for _ in range(size // 2)]
    popped += [frontier.pop() for _ in range(pushed - len(popped))]
    assert popped == [(bytes([i % 251]) * (i % 7), i * 50) for i in range(pushed)]


# The graph.


def graph_of(edges: list[tuple[int, ...]]) -> StateGraph:
    """Return a graph in which state i waits in states edges[i], each found by its number."""
    graph = StateGraph()
    for index in range(len(edges)):
        graph.add_state(bytes([index]) * 16, max(0, index - 1), index)
        graph.action_index(Action(ADD, index))
    for successors in edges:
        graph.end_expansion([(index, index) for index in successors])
    return graph


def test_a_graph_of_branches_that_meet_has_no_cycle() -> None:
    assert graph_of([(1, 2), (3,), (3,), ()]).find_cycle() is None


def test_the_cycle_nearest_to_the_first_state_is_found() -> None:
    """States 1 and 4 lead to the cycles 2-3 and 5-6-7; 8 is reached from a cycle."""
    graph = graph_of([(1, 4), (2,), (3, 8), (2,), (5,), (6,), (7,), (5,), ()])
    lasso = graph.find_cycle()
    assert lasso is not None
    assert lasso.stem == [Action(ADD, 1), Action(ADD, 2)]
    assert lasso.cycle == [Action(ADD, 3), Action(ADD, 2)]


def test_a_path_leads_to_its_state() -> None:
    world = find_world("pair", 2)
    search = Search(world, FCFS)
    search.run(200)
    canonical = Canonicaliser(world)
    for index in range(0, search.graph.num_states, 17):
        state = create_state(world, FCFS)
        for action in search.graph.path_to(index):
            perform(world, state, action)
        assert search.graph.indices[canonical.digest(state.scheduler)] == index


@pytest.mark.long
def test_a_search_that_is_continued_from_a_file_finds_the_same(tmp_path: Path) -> None:
    world, path = find_world("exempt", 2), str(tmp_path / "checkpoint")
    whole = Search(world, FCFS)
    whole.run(10_000)
    search = Search(world, FCFS)
    report = search.run(300)
    assert not report.is_complete and report.num_drained > 0
    search.graph.write(path, {"note": 1})
    graph, header = StateGraph.read(path)
    assert header["note"] == 1
    continued = Search(world, FCFS, graph)
    assert continued.run(10_000).is_complete
    assert continued.graph.indices == whole.graph.indices
    last = whole.graph.num_states - 1
    assert continued.graph.path_to(last) == whole.graph.path_to(last)


@pytest.mark.long
def test_of_a_large_frontier_some_states_are_drained_and_all_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = find_world("exempt", 2)
    whole, search = Search(world, FCFS), Search(world, FCFS)
    whole.run(10_000)
    num_drained = search.run(300).num_drained
    monkeypatch.setattr(search_module, "MAX_DRAINS", 3)
    assert 0 < search.run(301).num_drained < num_drained
    assert search.run(10_000).is_complete
    assert list(search.graph.indices) == list(whole.graph.indices)


def test_a_graph_of_another_scheduler_is_refused() -> None:
    search = Search(find_world("lengths", 1), FCFS)
    search.run(300)
    with pytest.raises(ValueError, match="is another one now"):
        Search(find_world("lengths", 1), POLICIES["shortest-prompt"], search.graph)


# The drawing and the command.


def test_a_counterexample_is_drawn_with_slots_blocks_and_queue() -> None:
    world = find_world("lengths", 1)
    actions = (Action(ADD, 1), Action(ADD, 0), Action(SCHEDULE))
    again = (Action(COMMIT, outcomes=(GO,)), Action(RESET))
    text = draw(world, FCFS, Counterexample("what failed", actions, again))
    assert text.splitlines() == [
        "         action     slots  blocks  queue  in flight",
        "      1  add 1      ..     ....    B",
        "      2  add 0      ..     ....    BA",
        "      3  schedule   B.     BB..    A      B[0:3)",
        "again >  commit go  B.     BB..    A",
        "      5  reset      B.     BB..    A",
        "         * shared, c cached, . empty; B[0:2) computes positions 0 and 1 of B",
        "what failed",
    ]


def test_the_command_prints_figures_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    words = ["--world", "exempt", "--depth", "1", "--json", str(file)]
    assert main(["sim", "explore", *words]) == 0
    shown = capsys.readouterr().out
    assert "states      394, all of them" in shown and "violations  none" in shown
    record = json.loads(file.read_text())
    assert (record["states"], record["complete"], record["error"]) == (394, True, None)


def test_the_command_draws_a_counterexample_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "lengths", "--depth", "1", "--states", "300"]
    assert main(["sim", "explore", *words, "--policy", "shortest-prompt"]) == 1
    shown = capsys.readouterr().out
    assert "again >  add 0" in shown and shown.endswith(f"{STARVATION}\n")


@pytest.mark.long
def test_the_command_continues_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sim", "explore", "--world", "exempt", "--checkpoint", str(tmp_path / "states")]
    assert main([*words, "--states", "100"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "continued   from 10" in shown and "states      779, all of them" in shown
    assert main([*words, "--depth", "1"]) == 2
    assert "is of the world exempt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--world nowhere", "--world: 'nowhere' is not known. Give pair, "),
        ("--depth 3", "--depth: 3 is not supported. Give 1 or 2"),
        ("--states 0", "--states: 0 is not from 1 to 100000000"),
        ("--policy nonesuch", "--policy: 'nonesuch' is not known"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "explore", *words.split()]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"forge sim explore: {error}") and shown.count("\n") == 1


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(b"{}\n")
    with pytest.raises(InvalidConfig, match="it is no checkpoint of this version"):
        StateGraph.read(str(file))
