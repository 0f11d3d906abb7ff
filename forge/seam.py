"""The seam: everything that crosses between policy and a model. Values, and one protocol.

Above it the policy decides which positions of which sequences are computed, for any model. Below it
a model computes rows, for any policy.

There are no phases. A row says: compute positions [start, start + n) of this sequence. A prompt, a
chunk of one, a decode step, a resumed sequence and the part of a prompt after a prefix hit are all
that row ("computed tokens catch up with known tokens", as vLLM v1 puts it).

The plan is a diff. A row says how its slot's block table changes: keep the first `keep` blocks,
then append `new_blocks`. A model's tables are the fold of these diffs.

    slot 3's table   [7 2 9]      keep=3 new_blocks=()      one more token, same blocks
                     [7 2 9 4]    keep=3 new_blocks=(4,)    the last block was full
                     [5 1]        keep=0 new_blocks=(5, 1)  the slot now belongs to another sequence

A plan can be made before earlier tokens are known: an input that an earlier row samples is a
reference (step, row) in `refs`. A model runs plans in the order given, so it can resolve it.

Drafts to be verified are a row's last inputs. A draft model's plans travel in `StepPlan.drafts`,
and a row refers to each draft by (plan, row): distributions stay below the seam.

    plan.drafts[0]   rows  ... x            d1 sampled after x         target's row:  x d1 d2
    plan.drafts[1]   rows  d1 (reference)   d2 sampled after d1                       1 to 3 tokens

A grammar's mask depends on the token before, which may be in flight. A row that is planned ahead of
it is named in `late_rows`, and the next plan gives its mask. So a model runs the row up to its
logits, and samples once the host has seen the token.

    plan 4   late_rows=(0,)              rows  0: input of plan 3, up to the logits
    plan 5   late_masks=((0, mask),)     row 0 of plan 4 is sampled first; then the rows of plan 5

Blocks also move between the device and a pool of blocks in host memory. A plan is a barrier: its
rows and moves are complete before anything of the next plan begins. Within a plan, moves may run at
any time alongside the rows, so no row touches a block that its own plan moves.

    plan n     |   rows   |            block 7 is loaded from host block 2
               | 2 ─► 7   |            block 4 is stored to host block 5
               | 4 ─► 5   |
    plan n+1              |   rows   | may read block 7 and write block 4
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from forge.request import SamplingParams, TokenLogprob


def _repr_without_defaults(value: Any) -> str:
    """Return a text that builds an equal value. Fields at their default are left out."""
    defaults = value._field_defaults
    fields = zip(value._fields, value, strict=True)
    parts = [f"{k}={v!r}" for k, v in fields if k not in defaults or v != defaults[k]]
    return f"{type(value).__name__}({', '.join(parts)})"


class TokenRef(NamedTuple):
    """Reference to the token that row `row` of plan `step` samples."""

    step: int
    row: int


class DraftRef(NamedTuple):
    """Reference to the token of row `row` of `StepPlan.drafts[plan]`, and its distribution."""

    plan: int
    row: int


Draft: TypeAlias = int | DraftRef
"""An input to verify: a token that a proposer guessed, or one that a draft model samples."""

COUPLED, REJECTION = "coupled", "rejection"
"""Acceptance rules of forge.acceptance."""


class Bind(NamedTuple):
    """Properties of the sequence that takes over a slot.

    params       how its tokens are chosen
    seed         64-bit unsigned key of its draws
    prompt_len   tokens before this position are prompt, the others output
    end_ids      ids that `params.min_tokens` masks, besides `params.stop_token_ids`
    history      tokens of the slot besides those that its rows contain: the first `start` ones
                 where penalties count them, the whole prompt for prompt logprobs
    acceptance   rule by which its drafts are accepted
    proposes     its tokens are drafts for another model
    """

    params: SamplingParams
    seed: int
    prompt_len: int
    end_ids: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    acceptance: str = COUPLED
    proposes: bool = False

    @property
    def uses_rejection(self) -> bool:
        """True where rejection accepts its drafts. Greedy drafts are compared instead."""
        return self.acceptance == REJECTION and not self.params.greedy

    def __repr__(self) -> str:
        return _repr_without_defaults(self)


class Row(NamedTuple):
    """Compute positions [start, start + len(tokens) + len(refs) + len(drafts)) of one sequence.

    seq_id        id of the sequence; never reused
    epoch         how often the sequence has lost its blocks; a result for an older epoch
                  says nothing about the blocks it has now
    slot          row of the device's state tables, 0 <= slot < max_num_seqs
    start         first position computed; every earlier one is in the table's blocks
    tokens        known inputs, in order
    refs          inputs after those, sampled by earlier rows
    keep          blocks of the slot's table that stay
    new_blocks    block ids appended to them
    num_samples   most tokens to sample: 0 (an unfinished chunk, or max_tokens = 0), or 1 more than
                  there are drafts
    bind          set when the slot changes its sequence; the table is then given whole (keep = 0)
    masks         ids that may be sampled, one mask a sample: id t is bit t % 8 of byte t // 8.
                  Empty: every id, unless the row is one of the plan's `late_rows`
    drafts        inputs after all others, to be verified. The next row's `start` says how many
                  were accepted: the slot's state of later positions is dropped
    """

    seq_id: int
    epoch: int
    slot: int
    start: int
    tokens: tuple[int, ...] = ()
    refs: tuple[TokenRef, ...] = ()
    keep: int = 0
    new_blocks: tuple[int, ...] = ()
    num_samples: int = 0
    bind: Bind | None = None
    masks: tuple[bytes, ...] = ()
    drafts: tuple[Draft, ...] = ()

    def __repr__(self) -> str:
        return _repr_without_defaults(self)

    @property
    def end(self) -> int:
        """End position: one past the last position computed."""
        return self.start + len(self.tokens) + len(self.refs) + len(self.drafts)


assert Row._fields == (
    *("seq_id", "epoch", "slot", "start", "tokens", "refs"),
    *("keep", "new_blocks", "num_samples", "bind", "masks", "drafts"),
), "plan_rows.write_decodes and ModelDrafter.propose build a Row as a tuple of these fields"


class LateMask(NamedTuple):
    """Mask of row `row` of the plan before, which is one of its `late_rows`. As in Row.masks."""

    row: int
    mask: bytes


class BlockCopy(NamedTuple):
    """Copy every layer of block `source` over block `target`."""

    source: int
    target: int


class HostStore(NamedTuple):
    """Copy every layer of `block` to a block of the host pool. No sequence holds `block`."""

    block: int
    host_block: int


class HostLoad(NamedTuple):
    """Copy every layer of a block of the host pool to `block`: the next one of a sequence's table.

    A model needs neither `seq_id` nor `epoch`; they are those of a Row.
    """

    seq_id: int
    epoch: int
    block: int
    host_block: int


class HostFile(NamedTuple):
    """Write a host block to the file of `key`, or read it from there.

    It takes longer than a step: a later output has the answer. Until then nothing else writes the
    host block.
    """

    host_block: int
    key: bytes


class FileAnswer(NamedTuple):
    """End of a spill or fetch of plan `step`.

    is_good   the file was written, or the host block has its content
    """

    step: int
    host_block: int
    is_good: bool


class Event(NamedTuple):
    """A change of a sequence's state, and why. For people; models ignore it."""

    seq_id: int
    why: str


class StepPlan(NamedTuple):
    """Work of one step: resize the pools, do the copies, compute the rows and, alongside, move.

    Before all that, rows of the plan before are sampled: those of `late_masks`.
    Its repr is text that builds an equal plan, to be pasted into a test. No block and no host block
    is in two moves, and no row or copy reads or writes a block that is moved.

    step         0, 1, 2, ... in the order a model must run them; never reused
    rows         at most max_num_seqs, one per slot
    num_blocks   size of the pool from this step on
    block_size   positions per block: a model with another block size must refuse the plan
    copies       within the device, before any row reads or writes
    drafts       plans of the draft model, which runs them in order before the rows. Their steps
                 count separately, and blocks and slots are the draft model's
    admitted, preempted, finished    since the plan before
    num_host_blocks   size of the host pool from this step on; 0: there is none
    stores       moves from the device to the host pool, done before the next plan begins
    loads        moves from the host pool to the device, done before the next plan begins
    spills       host blocks to write to files; answered later
    fetches      host blocks to read from files; answered later
    file_epoch   a model that sees another one than before has ended the spills and fetches of
                 earlier plans, without answers, before it runs this plan
    late_rows    rows with one sample whose masks the next plan gives, ascending. They are computed
                 up to their logits
    late_masks   masks of the late rows of plan `step` - 1, ascending by row. One that is left out
                 is of a sequence that has ended: its result is dropped
    """

    step: int
    rows: tuple[Row, ...]
    num_blocks: int
    block_size: int
    copies: tuple[BlockCopy, ...] = ()
    drafts: tuple[StepPlan, ...] = ()
    admitted: tuple[Event, ...] = ()
    preempted: tuple[Event, ...] = ()
    finished: tuple[Event, ...] = ()
    num_host_blocks: int = 0
    stores: tuple[HostStore, ...] = ()
    loads: tuple[HostLoad, ...] = ()
    spills: tuple[HostFile, ...] = ()
    fetches: tuple[HostFile, ...] = ()
    file_epoch: int = 0
    late_rows: tuple[int, ...] = ()
    late_masks: tuple[LateMask, ...] = ()

    def __repr__(self) -> str:
        return _repr_without_defaults(self)

    @property
    def num_tokens(self) -> int:
        """Positions that this plan computes in the target."""
        # `end - start` takes three times as long.
        return sum([len(row.tokens) + len(row.refs) + len(row.drafts) for row in self.rows])

    @property
    def is_uniform(self) -> bool:
        """True where nothing was decided: no event, no copy or move, and rows of one more token."""
        if self.admitted or self.preempted or self.finished or self.copies:
            return False
        if self.stores or self.loads or self.spills or self.fetches:
            return False
        if self.late_rows or self.late_masks:
            return False
        # A row has at least one token.
        return self.num_tokens == len(self.rows) and all(row.num_samples == 1 for row in self.rows)


class Verified(NamedTuple):
    """A draft that was verified, and the numbers that decided. See forge.acceptance.

    token      the draft
    p, q       its probability under the target and where it was drawn; None where these are not
               needed: the rule is `coupled`, or the row is greedy
    residual   the token in its place if it is rejected; None as above
    """

    token: int
    p: float | None = None
    q: float | None = None
    residual: int | None = None


class RowOutput(NamedTuple):
    """Result of one row.

    tokens            as many as the row's num_samples; with drafts 1 or more, by the acceptance
                      rule; () for an errored row
    logprobs          one per token where the slot's params request it
    prompt_logprobs   one per prompt position p with start < p <= end, where the slot's params
                      request it: log probability of the prompt's token at p
    error             None, or why this row has no result (non-finite logits); the step goes on
    verified          drafts up to the first that is rejected; fewer than that where the draft model
                      failed to give one
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    verified: tuple[Verified, ...] = ()


class StepOutput(NamedTuple):
    """Results of plan `step`, rows in the plan's order.

    undrafted   sequences for which the draft model failed: it must compute them again
    answers     spills and fetches of this plan and earlier ones that have ended
    """

    step: int
    rows: tuple[RowOutput, ...]
    undrafted: tuple[int, ...] = ()
    answers: tuple[FileAnswer, ...] = ()


class PendingStep(Protocol):
    """A step that a model has accepted and that may still be running."""

    def result(self) -> StepOutput:
        """Wait for this step only and return what it produced.

        A late row has a result once the next plan was accepted, and an error before that.
        Raises whatever broke the step as a whole; every plan in flight is then void.
        """
        ...


class Model(Protocol):
    """Interface of a backend: three numbers and one call."""

    def vocab_size(self) -> int:
        """Return the width of the logits: every token id is below it."""
        ...

    def num_layers(self) -> int:
        """Return the number of layers whose keys and values a block holds."""
        ...

    def eos_token(self) -> int:
        """Return the id that ends an output."""
        ...

    def forward(self, plan: StepPlan) -> PendingStep:
        """Accept a plan and return at once. Plans run in the order of this call."""
        ...


@runtime_checkable
class MovesBlocks(Protocol):
    """Optional method of a Model, for plans with a host pool. A wrapper gives the inner answer."""

    def executes_moves(self) -> bool:
        """Return whether `forward` carries out stores and loads."""
        ...


def executes_moves(model: Model) -> bool:
    """Return whether the model carries out stores and loads. One without the method does not."""
    return isinstance(model, MovesBlocks) and model.executes_moves()


@runtime_checkable
class SamplesLateRows(Protocol):
    """Optional method of a Model, for structures at depth 2. A wrapper gives the inner answer."""

    def samples_late_rows(self) -> bool:
        """Return whether `forward` leaves `late_rows` unsampled until the next plan's masks."""
        ...


def samples_late_rows(model: Model) -> bool:
    """Return whether the model samples late rows with their masks.

    One without the method is taken to ignore `StepPlan.late_rows`.
    """
    return isinstance(model, SamplesLateRows) and model.samples_late_rows()
