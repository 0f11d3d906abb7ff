"""Defects planted in the core: the seeds find each, from a printed seed, in at most ten operations.

A defect is a replacement of one function of forge for the length of a test. Nothing below tells the
checks what to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from forge import blocks, prefix
from forge.blocks import BlockPool, Grown
from forge.drafting import DraftModel
from forge.engine import Engine
from forge.prefix import PrefixSharing
from forge.request import Delta
from forge.scheduler import Scheduler
from forge.seam import Row, StepOutput, StepPlan
from forge.sequence import Sequence
from sim.faults import Op
from sim.seeds import Found, run_ops, run_seeds
from sim.shrink import shrunk

MOST_SEEDS, MOST_OPS = 200, 10


# Shrinking.


def test_a_list_shrinks_to_the_items_that_matter_in_their_order() -> None:
    assert shrunk(range(40), lambda some: {3, 17, 31} <= set(some)) == [3, 17, 31]


def test_nothing_can_be_left_out_of_what_is_left() -> None:
    """Any three even items fail: three are left, and the first trials decide which."""
    left = shrunk(range(64), lambda some: sum(item % 2 == 0 for item in some) >= 3)
    assert len(left) == 3 and all(item % 2 == 0 for item in left)


def test_what_fails_without_any_item_shrinks_to_nothing() -> None:
    assert shrunk([1, 2, 3], lambda some: True) == []


def test_equal_items_are_items_of_their_own() -> None:
    assert shrunk([7] * 9, lambda some: len(some) >= 2) == [7, 7]


def test_what_passes_is_not_shrunk() -> None:
    with pytest.raises(AssertionError, match="does not fail"):
        shrunk([1, 2, 3], lambda some: False)


# Defects.


def leak_on_abort(planted: pytest.MonkeyPatch) -> None:
    """The last block of a sequence that is aborted is nobody's."""
    abort = Scheduler.abort

    def leaking(self: Scheduler, request_id: int) -> list[Delta]:
        for sequence in self.requests.get(request_id, ()):
            del sequence.table.blocks[-1:]
        return abort(self, request_id)

    planted.setattr(Scheduler, "abort", leaking)


def block_too_few(planted: pytest.MonkeyPatch) -> None:
    """A table of exactly so many full blocks and one token has no block for the token."""

    def blocks_for(self: BlockPool, num_tokens: int) -> int:
        return max(1, -(-(num_tokens - 1) // self.block_size))

    planted.setattr(BlockPool, "blocks_for", blocks_for)


def stale_prefix(planted: pytest.MonkeyPatch) -> None:
    """An evicted block is still found under the hash of what it held."""

    def evict(self: BlockPool) -> int:
        block, _ = self._cached.popitem(last=False)
        self._hash_of.pop(block)
        return block

    planted.setattr(BlockPool, "_evict", evict)


def prefix_without_its_beginning(planted: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens, whatever stands before it."""

    def chain_hashes(parent: bytes, tokens: Any, block_size: int) -> list[bytes]:
        firsts = range(0, len(tokens), block_size)
        return [blocks.chain_hash(b"", tokens[first : first + block_size]) for first in firsts]

    planted.setattr(prefix, "chain_hashes", chain_hashes)


def lost_wake_up(planted: pytest.MonkeyPatch) -> None:
    """Who waits for a block that somebody was computing is not told that nobody is."""
    planted.setattr(PrefixSharing, "disclaim", lambda self, sequence: None)


def order_of_a_set(planted: pytest.MonkeyPatch) -> None:
    """Rows come in the order in which a set gives its members."""
    plan_decodes = Scheduler._plan_decodes

    def shuffled(self: Scheduler, rows: list[Row], sequences: Iterable[Sequence]) -> None:
        named = {sequence.id: sequence for sequence in sequences}
        plan_decodes(self, rows, [named[seq_id] for seq_id in set(named)])

    planted.setattr(Scheduler, "_plan_decodes", shuffled)


def double_finish(planted: pytest.MonkeyPatch) -> None:
    """A request that is aborted ends twice."""

    def abort(self: Engine, request_id: int) -> None:
        self._undelivered += 2 * self.scheduler.abort(request_id)

    planted.setattr(Engine, "abort", abort)


def abort_ignored(planted: pytest.MonkeyPatch) -> None:
    """A request whose prompt is being computed cannot be aborted."""
    abort = Engine.abort

    def deaf(self: Engine, request_id: int) -> None:
        sequences = self.scheduler.requests.get(request_id, ())
        if not any(sequence.id in self.scheduler._filling for sequence in sequences):
            abort(self, request_id)

    planted.setattr(Engine, "abort", deaf)


def epoch_ignored(planted: pytest.MonkeyPatch) -> None:
    """A late result counts as one for the blocks that the sequence has now."""
    commit = Scheduler.commit

    def careless(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
        if self.ledger and self.ledger[0] is plan:
            epochs = {s.id: s.epoch for s in self._live.values()}
            rows = [row._replace(epoch=epochs.get(row.seq_id, row.epoch)) for row in plan.rows]
            plan = self.ledger[0] = plan._replace(rows=tuple(rows))
        return commit(self, plan, output)

    planted.setattr(Scheduler, "commit", careless)


def draft_blocks_kept(planted: pytest.MonkeyPatch) -> None:
    """Blocks that were taken for drafts stay with the table once these were rejected."""

    def shrink(self: BlockPool, seq_id: int, num_tokens: int, num_blocks: int) -> None:
        self.tables[seq_id].num_tokens = num_tokens

    planted.setattr(BlockPool, "shrink", shrink)


def draft_table_kept(planted: pytest.MonkeyPatch) -> None:
    """The draft model's blocks of a sequence that has ended are not given back."""

    def forget(self: DraftModel, sequence: Sequence) -> None:
        self._followers.pop(sequence.id, None)

    planted.setattr(DraftModel, "forget", forget)


def rejected_draft_published(planted: pytest.MonkeyPatch) -> None:
    """A block is published whose last position holds the draft that was rejected there."""
    publish = PrefixSharing.publish

    def early(self: PrefixSharing, sequence: Sequence, start: int, end: int) -> None:
        publish(self, sequence, start, end + (sequence.num_drafts > 0))

    planted.setattr(PrefixSharing, "publish", early)


def token_of_the_preempted_lost(planted: pytest.MonkeyPatch) -> None:
    """What was in flight for a sequence that lost its blocks is dropped, and computed again."""
    commit = Scheduler.commit

    def forgetful(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
        waiting = {i: s for i, s in self._live.items() if s.slot is None}
        for seq_id in waiting:
            del self._live[seq_id]
        deltas = commit(self, plan, output)
        self._live.update(waiting)
        return deltas

    planted.setattr(Scheduler, "commit", forgetful)


def copy_forgotten(planted: pytest.MonkeyPatch) -> None:
    """A shared block is replaced by a private one, and its content is not copied."""
    grow = BlockPool.grow

    def without(self: BlockPool, seq_id: int, num_tokens: int) -> Grown:
        return grow(self, seq_id, num_tokens)._replace(copied=None)

    planted.setattr(BlockPool, "grow", without)


def shrunk_pool_remembered(planted: pytest.MonkeyPatch) -> None:
    """A pool that was made smaller hands out a block past its end."""
    resize = BlockPool.resize

    def generous(self: BlockPool, num_blocks: int) -> None:
        past = [block for block in self._free if block >= num_blocks][:1]
        resize(self, num_blocks)
        self._free += past

    planted.setattr(BlockPool, "resize", generous)


def prompt_scored_again(planted: pytest.MonkeyPatch) -> None:
    """After a preemption the prompt's logprobs are told once more."""

    def unscored(self: Scheduler, sequence: Sequence, row: Row, scores: Any) -> Any:
        return scores

    planted.setattr(Scheduler, "_unscored", unscored)


def told_behind_its_end(planted: pytest.MonkeyPatch) -> None:
    """Tokens behind an end among accepted drafts are told as well."""
    extend = Scheduler._extend

    def greedy(self: Scheduler, sequence: Sequence, tokens: tuple[int, ...]) -> Any:
        ending = extend(self, sequence, tokens)
        return ending._replace(taken=len(tokens)) if ending.error is None else ending

    planted.setattr(Scheduler, "_extend", greedy)


DEFECTS = (
    leak_on_abort,
    block_too_few,
    stale_prefix,
    lost_wake_up,
    order_of_a_set,
    double_finish,
    epoch_ignored,
    draft_blocks_kept,
    rejected_draft_published,
    token_of_the_preempted_lost,
)
MORE_DEFECTS = (
    abort_ignored,
    prefix_without_its_beginning,
    draft_table_kept,
    copy_forgotten,
    shrunk_pool_remembered,
    prompt_scored_again,
    told_behind_its_end,
)


def found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> Found:
    """What the seeds find of the defect, and tell."""
    plant(monkeypatch)
    told: list[str] = []
    report = run_seeds(0, MOST_SEEDS - 1, tell=told.append)
    assert report.found is not None, f"{plant.__name__} survives {report.num_seeds} seeds"
    assert told == [str(report.found)]
    return report.found


@pytest.mark.parametrize(
    "plant",
    (*DEFECTS, *(pytest.param(plant, marks=pytest.mark.soak) for plant in MORE_DEFECTS)),
    ids=lambda plant: plant.__name__,
)
def test_a_planted_defect_is_found_and_shrinks_to_ten_operations(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations that are left violate the same again, and nothing without the defect."""
    what = found(plant, monkeypatch)
    print(what)
    assert 1 <= len(what.ops) <= MOST_OPS
    assert run_ops(what.seed, what.ops).violation == what.violation
    monkeypatch.undo()
    assert run_ops(what.seed, what.ops).violation is None


def test_what_is_told_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text from its first import on is a program that shows the violation."""
    what = found(double_finish, monkeypatch)
    program = str(what)[str(what).index("from sim.faults import Op") :]
    shown: list[object] = []
    exec(program, {"print": shown.append})
    assert shown == [what.violation]
    assert f"first at step {what.violation.step}" in str(what)


def test_what_is_not_seen_again_is_told_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every violation is the seed's: here the second run of it goes well."""
    release, broken = BlockPool.release, [True]

    def once(self: BlockPool, seq_id: int) -> None:
        release(self, seq_id)
        assert not broken or not broken.pop(), "it broke"

    monkeypatch.setattr(BlockPool, "release", once)
    what = found(lambda planted: None, monkeypatch)
    assert "it broke" in str(what) and "seen once, and not again" in str(what)
    assert len(what.ops) == what.num_ops


def test_an_operation_is_shown_as_what_builds_it() -> None:
    for op in (Op(0, "submit"), Op(1_500, "abort", who=3), Op(9, "shrink", amount=4)):
        assert eval(repr(op)) == op
