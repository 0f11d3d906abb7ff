"""Defects planted in the core: fuzzing finds each from a seed, in at most ten operations.

A defect replaces one function of forge for the length of a test. The checks do not depend on the
defects. Some defects need one check each: without it another check, or none, finds them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from forge import blocks, plan_rows, prefix_cache, scheduler
from forge.blocks import BlockPool, TableGrowth
from forge.drafting import ModelDrafter
from forge.engine import Engine
from forge.models import row_sampling
from forge.models.logits import ContextDecoder
from forge.policy import FCFS, POLICIES
from forge.prefix_cache import PrefixCache
from forge.request import Delta, FinishReason
from forge.scheduler import Scheduler
from forge.seam import Row, StepOutput, StepPlan
from forge.sequence import AppendResult, Sequence
from forge.sim.clock import Clock
from forge.sim.faults.fuzz import FailingSeed, run_ops, run_seeds
from forge.sim.faults.operations import Op
from forge.sim.faults.shrink import shrink
from forge.sim.metrics import RunMetrics
from forge.sim.world import World

MOST_SEEDS, MOST_OPS = 200, 10


# Shrinking.


def test_a_list_shrinks_to_the_items_that_matter_in_their_order() -> None:
    assert shrink(range(40), lambda some: {3, 17, 31} <= set(some)) == [3, 17, 31]


def test_no_item_can_be_left_out_of_a_shrunk_list() -> None:
    """Any three even items fail: three are left, and the first trials decide which."""
    left = shrink(range(64), lambda some: sum(item % 2 == 0 for item in some) >= 3)
    assert len(left) == 3 and all(item % 2 == 0 for item in left)


def test_a_failure_without_any_item_shrinks_to_nothing() -> None:
    assert shrink([1, 2, 3], lambda some: True) == []


def test_equal_items_are_separate_items() -> None:
    assert shrink([7] * 9, lambda some: len(some) >= 2) == [7, 7]


def test_a_passing_list_is_not_shrunk() -> None:
    with pytest.raises(AssertionError, match="only a failing list"):
        shrink([1, 2, 3], lambda some: False)


# Defects.


def leak_on_abort(planted: pytest.MonkeyPatch) -> None:
    """The last block of an aborted sequence is lost."""
    abort = Scheduler.abort

    def leaking(self: Scheduler, request_id: int) -> list[Delta]:
        for sequence in self.requests.get(request_id, ()):
            del sequence.table.blocks[-1:]
        return abort(self, request_id)

    planted.setattr(Scheduler, "abort", leaking)


def block_too_few(planted: pytest.MonkeyPatch) -> None:
    """A table of some full blocks and one token has no block for the token."""

    def num_blocks_for(self: BlockPool, num_tokens: int) -> int:
        return max(1, -(-(num_tokens - 1) // self.block_size))

    planted.setattr(BlockPool, "num_blocks_for", num_blocks_for)


def stale_prefix(planted: pytest.MonkeyPatch) -> None:
    """An evicted block is still found under the hash of its old content."""

    def evict(self: BlockPool) -> int:
        block, _ = self._cached_blocks.popitem(last=False)
        self._hash_by_block.pop(block)
        return block

    planted.setattr(BlockPool, "_evict", evict)


def prefix_without_its_beginning(planted: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens, whatever precedes it."""

    def chain_hashes(parent: bytes, tokens: Any, block_size: int) -> list[bytes]:
        firsts = range(0, len(tokens), block_size)
        return [blocks.chain_hash(b"", tokens[first : first + block_size]) for first in firsts]

    planted.setattr(prefix_cache, "chain_hashes", chain_hashes)


def lost_wake_up(planted: pytest.MonkeyPatch) -> None:
    """A sequence that waits for a block in progress stays waiting when its computation ends."""
    planted.setattr(PrefixCache, "remove_in_progress", lambda self, sequence: None)


def order_of_a_set(planted: pytest.MonkeyPatch) -> None:
    """Rows are in the iteration order of a set."""
    write_decodes = plan_rows.write_decodes

    def shuffled(rows: list[Row], sequences: Iterable[Sequence], step: int) -> int:
        named = {sequence.id: sequence for sequence in sequences}
        return write_decodes(rows, [named[seq_id] for seq_id in set(named)], step)

    planted.setattr(scheduler, "write_decodes", shuffled)


def double_finish(planted: pytest.MonkeyPatch) -> None:
    """An aborted request ends twice."""

    def abort(self: Engine, request_id: int) -> None:
        self._undelivered_deltas += 2 * self.scheduler.abort(request_id)

    planted.setattr(Engine, "abort", abort)


def abort_ignored(planted: pytest.MonkeyPatch) -> None:
    """A request whose prompt is being computed cannot be aborted."""
    abort = Engine.abort

    def deaf(self: Engine, request_id: int) -> None:
        sequences = self.scheduler.requests.get(request_id, ())
        if not any(sequence.id in self.scheduler._prefilling for sequence in sequences):
            abort(self, request_id)

    planted.setattr(Engine, "abort", deaf)


def epoch_ignored(planted: pytest.MonkeyPatch) -> None:
    """A late result counts for the blocks that the sequence has now."""
    commit = Scheduler.commit

    def careless(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
        if self.ledger and self.ledger[0] is plan:
            epochs = {s.id: s.epoch for s in self.sequences.values()}
            rows = [row._replace(epoch=epochs.get(row.seq_id, row.epoch)) for row in plan.rows]
            plan = self.ledger[0] = plan._replace(rows=tuple(rows))
        return commit(self, plan, output)

    planted.setattr(Scheduler, "commit", careless)


def draft_blocks_kept(planted: pytest.MonkeyPatch) -> None:
    """Blocks of drafts stay with the table after rejection."""

    def shrink(self: BlockPool, seq_id: int, num_tokens: int, num_blocks: int) -> None:
        self.tables[seq_id].num_tokens = num_tokens

    planted.setattr(BlockPool, "shrink", shrink)


def draft_table_kept(planted: pytest.MonkeyPatch) -> None:
    """The draft model keeps the blocks of a sequence that has ended."""

    def remove_sequence(self: ModelDrafter, sequence: Sequence) -> None:
        self._states.pop(sequence.id, None)

    planted.setattr(ModelDrafter, "remove_sequence", remove_sequence)


def rejected_draft_published(planted: pytest.MonkeyPatch) -> None:
    """A block is published with a rejected draft at its last position."""
    publish = PrefixCache.publish

    def early(self: PrefixCache, sequence: Sequence, start: int, end: int) -> None:
        publish(self, sequence, start, end + (sequence.num_drafts > 0))

    planted.setattr(PrefixCache, "publish", early)


def token_of_the_preempted_lost(planted: pytest.MonkeyPatch) -> None:
    """The token in flight of a preempted sequence is dropped and computed again."""
    commit = Scheduler.commit

    def forgetful(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
        waiting = {i: s for i, s in self.sequences.items() if s.slot is None}
        for seq_id in waiting:
            del self.sequences[seq_id]
        deltas = commit(self, plan, output)
        self.sequences.update(waiting)
        return deltas

    planted.setattr(Scheduler, "commit", forgetful)


def copy_forgotten(planted: pytest.MonkeyPatch) -> None:
    """A shared block is replaced by a private one without a copy of its content."""
    grow = BlockPool.grow

    def without(self: BlockPool, seq_id: int, num_tokens: int) -> TableGrowth:
        return grow(self, seq_id, num_tokens)._replace(copy=None)

    planted.setattr(BlockPool, "grow", without)


def shrunk_pool_remembered(planted: pytest.MonkeyPatch) -> None:
    """A pool that was made smaller allocates a block past its end."""
    resize = BlockPool.resize

    def generous(self: BlockPool, num_blocks: int) -> None:
        past = [block for block in self._empty_blocks if block >= num_blocks][:1]
        resize(self, num_blocks)
        self._empty_blocks += past

    planted.setattr(BlockPool, "resize", generous)


def prompt_scored_again(planted: pytest.MonkeyPatch) -> None:
    """After a preemption the prompt's logprobs are sent again."""

    planted.setattr(Sequence, "take_prompt_logprobs", lambda self, start, logprobs: logprobs)


def failed_row_published(planted: pytest.MonkeyPatch) -> None:
    """Blocks of a failed row are published."""
    commit_row = Scheduler._commit_row

    def trusting(self: Scheduler, sequence: Sequence, row: Row, result: Any, deltas: Any) -> None:
        if result.error is not None and row.epoch == sequence.epoch:
            self.prefix_cache.publish(sequence, sequence.num_committed, row.end - len(row.drafts))
        commit_row(self, sequence, row, result, deltas)

    planted.setattr(Scheduler, "_commit_row", trusting)


def sent_after_its_end(planted: pytest.MonkeyPatch) -> None:
    """Tokens after an end among accepted drafts are sent too."""
    append_tokens = Sequence.append_tokens

    def greedy(self: Sequence, tokens: tuple[int, ...], vocab_size: int) -> AppendResult:
        appended = append_tokens(self, tokens, vocab_size)
        return appended._replace(num_taken=len(tokens)) if appended.error is None else appended

    planted.setattr(Sequence, "append_tokens", greedy)


# Defects for one check each.


def place_matters(planted: pytest.MonkeyPatch) -> None:
    """The logits depend on the block that a context ends in, as a wrong kernel may compute them."""
    read = ContextDecoder._context

    def placed(self: ContextDecoder, table: list[int], end: int) -> array[int]:
        context = read(self, table, end)
        if table[(end - 1) // self.block_size] % 2:
            context.reverse()
        return context

    planted.setattr(ContextDecoder, "_context", placed)


def shared_once_too_often(planted: pytest.MonkeyPatch) -> None:
    """A table that shares a block counts as two of its owners."""
    share = BlockPool.share

    def twice(self: BlockPool, shared: Iterable[int]) -> None:
        shared = list(shared)
        share(self, shared)
        share(self, shared)

    planted.setattr(BlockPool, "share", twice)


def same_block_free_twice(planted: pytest.MonkeyPatch) -> None:
    """A reset lists one freed block in place of all: the right number, and wrong blocks."""
    reset_cache = BlockPool.reset_cache

    def reset(self: BlockPool) -> None:
        count = len(self._cached_blocks)
        reset_cache(self)
        if count:
            self._empty_blocks[-count:] = self._empty_blocks[-1:] * count

    planted.setattr(BlockPool, "reset_cache", reset)


def every_draft_accepted(planted: pytest.MonkeyPatch) -> None:
    """Rejection sampling rejects nothing, not even tokens with probability 0."""

    def biased(trials: Any, bonus: int) -> tuple[int, ...]:
        return (*(trial.draft for trial in trials), bonus)

    planted.setattr(row_sampling, "rejection_sample", biased)


def end_by_chance_misnamed(planted: pytest.MonkeyPatch) -> None:
    """A sampled output that ends with a stop token has the reason LENGTH."""
    append_tokens = Sequence.append_tokens

    def full(self: Sequence, tokens: tuple[int, ...], vocab_size: int) -> AppendResult:
        appended = append_tokens(self, tokens, vocab_size)
        by_token = self.bind.uses_rejection and appended.finish is FinishReason.STOP
        return appended._replace(finish=FinishReason.LENGTH) if by_token else appended

    planted.setattr(Sequence, "append_tokens", full)


def last_come_first_served(planted: pytest.MonkeyPatch) -> None:
    """The newest request is admitted first: older ones may starve."""
    planted.setitem(POLICIES, "fcfs", FCFS._replace(admit=lambda waiting, context: waiting[-1]))


def retried_indefinitely(planted: pytest.MonkeyPatch) -> None:
    """A sequence is computed again after every failure of the model."""
    void = Scheduler.void

    def patient(self: Scheduler, why: str) -> list[Delta]:
        for sequence in self.sequences.values():
            sequence.was_retried = False
        return void(self, why)

    planted.setattr(Scheduler, "void", patient)


def clock_backwards(planted: pytest.MonkeyPatch) -> None:
    """The host's time is subtracted from the clock."""

    def advance(self: Clock, duration_ns: int) -> None:
        self.now_ns -= duration_ns

    planted.setattr(Clock, "advance", advance)


def clock_set_back(planted: pytest.MonkeyPatch) -> None:
    """An early result sets the clock back to its own time."""

    def wait_until(self: Clock, time_ns: int) -> None:
        self.now_ns = time_ns

    planted.setattr(Clock, "wait_until", wait_until)


def submitted_early(planted: pytest.MonkeyPatch) -> None:
    """Events happen a microsecond before they are due."""
    due = World._push_event

    def hasty(self: World, at_ns: int, kind: int, what: Any) -> None:
        due(self, at_ns - 1_000, kind, what)

    planted.setattr(World, "_push_event", hasty)


def ended_late(planted: pytest.MonkeyPatch) -> None:
    """A request counts as in the system for a nanosecond too long."""
    end = RunMetrics.record_finish

    def late(self: RunMetrics, request_id: int, now_ns: int, how: str) -> bool:
        return end(self, request_id, now_ns + 1, how)

    planted.setattr(RunMetrics, "record_finish", late)


DEFECTS = (
    leak_on_abort,
    block_too_few,
    double_finish,
    epoch_ignored,
    draft_blocks_kept,
    rejected_draft_published,
    token_of_the_preempted_lost,
)
SLOW_DEFECTS = (failed_row_published, stale_prefix, lost_wake_up, order_of_a_set)
MORE_DEFECTS = (
    abort_ignored,
    prefix_without_its_beginning,
    draft_table_kept,
    copy_forgotten,
    shrunk_pool_remembered,
    prompt_scored_again,
    sent_after_its_end,
)


MESSAGE_BY_DEFECT: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    place_matters: r"choice \d+: \d+ at \d+, not \d+",
    shared_once_too_often: r"assert pool\._ref_counts == ",
    same_block_free_twice: r"assert sorted\(\[\*free, \*cached, \*references\]\) == ",
    every_draft_accepted: r"cannot be at \d+",
    end_by_chance_misnamed: r"ended by FinishReason\.LENGTH, not FinishReason\.STOP",
    clock_backwards: r"the clock went back from \d+ to -?\d+",
    submitted_early: r"submitted at \d+ ns: RequestArrival\(",
    last_come_first_served: r"were admitted, and \d+ came before them",
    retried_indefinitely: r"sequence \d+ was retried twice",
    ended_late: r"assert measures\.in_system_ns == ",
}
LATE_MESSAGE_BY_DEFECT = {clock_set_back: r"the clock went back from \d+ to \d+"}
"""Defect -> message of the check that must find it; another check, or none, would miss it."""


def find_defect(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> FailingSeed:
    """Plant the defect and return what the seeds find."""
    plant(monkeypatch)
    messages: list[str] = []
    report = run_seeds(0, MOST_SEEDS - 1, write_line=messages.append)
    assert report.failure is not None, f"{plant.__name__} survives {report.num_seeds} seeds"
    assert messages == [str(report.failure)]
    return report.failure


@pytest.mark.parametrize(
    "plant",
    (
        *DEFECTS,
        *(pytest.param(plant, marks=pytest.mark.long) for plant in SLOW_DEFECTS),
        *(pytest.param(plant, marks=pytest.mark.soak) for plant in MORE_DEFECTS),
    ),
    ids=lambda plant: plant.__name__,
)
def test_a_planted_defect_is_found_and_shrinks_to_ten_operations(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining operations fail again, and pass without the defect."""
    what = find_defect(plant, monkeypatch)
    print(what)
    assert 1 <= len(what.ops) <= MOST_OPS
    assert run_ops(what.seed, what.ops).violation == what.violation
    monkeypatch.undo()
    assert run_ops(what.seed, what.ops).violation is None


@pytest.mark.long
@pytest.mark.parametrize(
    "plant",
    (
        *MESSAGE_BY_DEFECT,
        *(pytest.param(plant, marks=pytest.mark.soak) for plant in LATE_MESSAGE_BY_DEFECT),
    ),
    ids=lambda plant: plant.__name__,
)
def test_a_defect_for_one_check_is_found_by_that_check(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = find_defect(plant, monkeypatch)
    assert re.search((MESSAGE_BY_DEFECT | LATE_MESSAGE_BY_DEFECT)[plant], what.violation.what), what


def test_the_report_of_a_failure_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text from its first import on is a program that shows the violation."""
    what = find_defect(double_finish, monkeypatch)
    program = str(what)[str(what).index("from forge.sim.faults.operations import Op") :]
    shown: list[object] = []
    exec(program, {"print": shown.append})
    assert shown == [what.violation]
    assert f"first at step {what.violation.step}" in str(what)


def test_a_violation_that_does_not_repeat_is_reported_unshrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some violations do not follow from the seed: here the second run passes."""
    release, broken = BlockPool.release, [True]

    def once(self: BlockPool, seq_id: int) -> None:
        release(self, seq_id)
        assert not broken or not broken.pop(), "it broke"

    monkeypatch.setattr(BlockPool, "release", once)
    what = find_defect(lambda planted: None, monkeypatch)
    assert "it broke" in str(what) and "seen once, and not again" in str(what)
    assert len(what.ops) == what.num_ops


def test_repr_of_an_operation_builds_an_equal_one() -> None:
    for op in (Op(0, "submit"), Op(1_500, "abort", who=3), Op(9, "shrink", amount=4)):
        assert eval(repr(op)) == op
