"""Iteration-level scheduling: which positions of which sequences the next plan computes.

Owns the queues, the slots and the sequences; drives the BlockPool. Knows no model, tokenizer or
clock: `schedule()` needs only what is here, and `commit()` learns only token ids. Same calls, same
plans.

    add ──► waiting ──admit──► running ──commit──► finished
               ▲                  │
               └──── preempt ─────┘      its blocks go, its tokens stay, it is computed again

`schedule()` makes room for the decodes (preempting where blocks run out), admits, splits the token
budget, and returns a plan. `commit(plan, output)` takes plans in order and returns what each choice
gained. Plan n+1 may be made before plan n is committed: its rows then name the tokens that n
samples. What is in flight is the ledger of plans and nothing else, so no counter can disagree.

Always true: a running sequence has a slot and a table, a waiting one has neither. A prompt's blocks
are taken at admission, a decode's when it crosses a block edge. A block is published when the step
that filled it is committed. A sequence is preempted at most MAX_PREEMPTIONS times: then it is
admitted with every block it can ever need, and is never a victim.

Iteration-level scheduling: Yu et al. 2022 (Orca). Chunked prefill: Agrawal et al. 2023 (Sarathi).
Recompute preemption: Kwon et al. 2023 (vLLM).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from forge.blocks import BlockPool
from forge.config import EngineConfig
from forge.drafting import Drafting
from forge.errors import (
    ContextTooLong,
    DuplicateRequest,
    NeverFits,
    PolicyError,
)
from forge.lookahead import Moment
from forge.policy import FCFS, Policy, Split
from forge.prefix import PrefixSharing
from forge.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from forge.sampling import choice_seed, mix
from forge.seam import (
    COUPLED,
    Bind,
    BlockCopy,
    Draft,
    Event,
    Row,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenRef,
)
from forge.sequence import (
    BY_STOP,
    BY_STRUCTURE,
    Guide,
    Sequence,
    StopWatch,
    no_guide,
    no_watch,
)

MAX_PREEMPTIONS = 8


def _asked(choose: Callable[..., Any], *offered: object) -> Any:
    """The policy's answer. Raises PolicyError, naming the line, for whatever it raises."""
    try:
        return choose(*offered)
    except Exception as fault:
        at = fault.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "nowhere"
        raise PolicyError(f"the policy raised {fault!r} at {where}. Mend it") from fault


def _named(choice: object) -> str:
    return f"sequence {choice.id}" if isinstance(choice, Sequence) else repr(choice)


def _within(split: object, budget: int, num_decodes: int, filling: list[Sequence]) -> bool:
    """The split spends no more than is there on no more than was offered."""
    return (
        isinstance(split, Split)
        and len(split.chunks) == len(filling)
        and type(split.num_decodes) is int
        and 0 <= split.num_decodes <= num_decodes
        and all(type(n) is int for n in split.chunks)
        and all(0 <= n <= s.num_pending for n, s in zip(split.chunks, filling, strict=True))
        and split.num_decodes + sum(split.chunks) <= budget
    )


class _Ending(NamedTuple):
    """How far a result was taken, and with what it ended.

    taken   tokens of the result that the output has, the last of them `stop_token` if set
    """

    taken: int
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


class Scheduler:
    """Turns requests into plans and plans' results into gains.

    queried_tokens   of sequences when they were first admitted; cached_tokens of them were in
                     blocks that another sequence had computed. A preemption changes neither
    planned_tokens   of all plans
    preemptions      how often a sequence lost its blocks and had to wait again
    drafted_tokens   that were judged; accepted_tokens of them were right
    begun            requests of which the last `schedule()` admitted a choice for the first time
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        end_ids: Iterable[int],
        policy: Policy = FCFS,
        watch: Callable[[SamplingParams], StopWatch | None] = no_watch,
        guide: Callable[[SamplingParams], Guide | None] = no_guide,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.sharing = PrefixSharing(config, self.pool)
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.requests: dict[int, list[Sequence]] = {}
        self.ledger: deque[StepPlan] = deque()
        self.cached_tokens = 0
        self.queried_tokens = 0
        self.planned_tokens = 0
        self.preemptions = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.begun: list[int] = []
        self._vocab_size = vocab_size
        self._end_ids = tuple(dict.fromkeys(end_ids))
        self._watch = watch
        self._guide = guide
        self._drafting = drafting
        self._acceptance = config.speculation.acceptance if config.speculation else COUPLED
        self._live: dict[int, Sequence] = {}
        self._filling: dict[int, Sequence] = {}
        self._stepwise: dict[int, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._next_seq_id = 0
        self._next_step = 0
        self._admitted: list[Event] = []
        self._preempted: list[Event] = []
        self._finished: list[Event] = []

    @property
    def has_work(self) -> bool:
        """A request has not ended."""
        return bool(self._live)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """The request waits; each of its choices is a sequence.

        Raises ContextTooLong or NeverFits when it could not finish even alone, DuplicateRequest
        when its id is live. Nothing has changed then.
        """
        if request.id in self.requests:
            raise DuplicateRequest("id", f"request {request.id} is live", "Use a new id")
        limit = self.limit(request)
        root = self.sharing.root(request)
        params = request.params
        seed = params.seed if params.seed is not None else mix(self.config.seed ^ mix(request.id))
        end_ids = () if params.ignore_eos else self._end_ids
        choices = []
        for choice in range(params.n):
            if choice == 1 and params.prompt_logprobs is not None:
                params = replace(params, prompt_logprobs=None)  # the same for all: reported once
            sequence = Sequence(
                id=self._next_seq_id,
                request=request,
                choice=choice,
                params=params,
                bind=Bind(
                    params,
                    choice_seed(seed, choice),
                    len(request.prompt),
                    end_ids,
                    acceptance=self._acceptance,
                ),
                tokens=list(request.prompt),
                limit=limit,
                stop_ids=frozenset(end_ids + params.stop_token_ids),
                watch=self._watch(params),
                guide=self._guide(params),
                hashes=[root],
                heed=limit,
            )
            self._next_seq_id += 1
            choices.append(sequence)
        self.requests[request.id] = choices
        for sequence in choices:
            self._live[sequence.id] = sequence
            self._wait(sequence)

    def limit(self, request: Request) -> int:
        """Length at which the request ends, prompt included: proof that it can finish alone.

        Raises ContextTooLong or NeverFits. Reads only geometry, so any thread may ask.
        """
        prompt_len, asked = len(request.prompt), request.params.max_tokens
        # Without a limit the output is as long as fits, which must be `min_tokens` at least.
        limit_name = "min_tokens" if asked is None else "max_tokens"
        longest = self.config.max_model_len
        positions = self.pool.num_blocks * self.config.block_size
        least = prompt_len + (max(1, request.params.min_tokens) if asked is None else asked)
        if least > longest:
            field_name = "prompt" if prompt_len >= longest else limit_name
            # These words are OpenAI's: by them, not by the code, clients know what happened.
            raise ContextTooLong(
                field_name,
                f"Input tokens exceed the configured limit of {longest} tokens: {prompt_len} "
                f"prompt tokens + {least - prompt_len} output tokens",
                f"Shorten the request or start with --max-model-len {least}",
            )
        # The last output token is never fed back, so it takes no position.
        if max(prompt_len, least - 1) > positions:
            blocks = self.pool.blocks_for(max(prompt_len, least - 1))
            raise NeverFits(
                "prompt" if prompt_len > positions else limit_name,
                f"{prompt_len} prompt tokens + {least - prompt_len} output tokens need {blocks} "
                f"blocks, the cache has {self.pool.num_blocks} of {self.config.block_size}",
                f"Shorten the request or start with --num-blocks {blocks}",
            )
        return min(longest, positions + 1) if asked is None else least

    def abort(self, request_id: int) -> list[Delta]:
        """The request is gone, wherever it was: its open choices end. An unknown id is none."""
        choices = self.requests.get(request_id, ())
        return [self._finish(sequence, FinishReason.ABORT) for sequence in list(choices)]

    # Planning.

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute before a commit.

        At most two plans may be in flight where a policy lets sequences skip a step: a token is
        named by the plan just before.
        Raises PolicyError when a policy's answer was not on offer, or nothing is in flight and it
        leaves everyone waiting.
        """
        before = len(self._preempted)
        self.begun.clear()
        held = self._held() if self._stepwise else set()
        if held and self._awaited(held) >= self._ready(held):
            return None
        starved = self._make_room()
        copies: list[BlockCopy] = []
        try:
            if len(self._preempted) == before:
                # A step that preempts admits nobody: the blocks it freed are for those who run.
                self._admit(copies)
            rows = self._plan_rows(starved | held)
        except PolicyError:
            # The copies of forks admitted just now are in no plan: those sequences begin again.
            for sequence in [s for s in self._filling.values() if not s.told]:
                self._preempt(sequence, "the policy was refused")
            raise
        if not rows and not copies:
            if self._live and not self.ledger:
                raise PolicyError(
                    f"{len(self.waiting)} requests wait, {len(self.running)} run, and the policy "
                    "gives none of them a token. Let admit and split choose someone"
                )
            return None
        plan = StepPlan(
            self._next_step,
            tuple(rows),
            self.pool.num_blocks,
            self.pool.block_size,
            tuple(copies),
            self._drafting.plans() if self._drafting is not None else (),
            tuple(self._admitted),
            tuple(self._preempted),
            tuple(self._finished),
        )
        self._next_step += 1
        self._admitted.clear()
        self._preempted.clear()
        self._finished.clear()
        self.ledger.append(plan)
        return plan

    def _held(self) -> set[int]:
        """Sequences whose mask or drafts depend on what is in flight: they wait for its commit."""
        return {s.id for s in self._stepwise.values() if s.num_pending <= 0 and not self._ending(s)}

    def _awaited(self, held: set[int]) -> int:
        """Tokens that the next rows of those held may give."""
        return sum(1 + self.running[seq_id].num_drafts for seq_id in held)

    def _ready(self, held: set[int]) -> int:
        """Tokens that a plan made now may give, beside those held: one a running sequence.

        Where they are no more there is no plan before the commit, or two halves that each wait for
        the other's step would take turns for ever.
        """
        return sum(s.id not in held and not self._ending(s) for s in self.running.values())

    def _make_room(self) -> set[int]:
        """Every running sequence has the block its next token goes to, or was preempted.

        Where a commit will or may give blocks back nobody is preempted: those that find no block
        are returned, and wait for that commit.
        """
        full = [i for i, t in self.pool.tables.items() if t.num_tokens == t.capacity]
        if not full:
            return set()
        growing = [self.running[i] for i in full]
        # One whose drafts are in flight has no next token yet.
        growing = [s for s in growing if s.table.num_tokens < s.limit - 1 and s.num_pending >= 0]
        if len(growing) > self.pool.available and not self._blocks_in_flight():
            growing = self._preempt_for(growing)
        count = self.pool.available
        self.pool.lengthen([sequence.id for sequence in growing[:count]])
        return {sequence.id for sequence in growing[count:]}

    def _blocks_in_flight(self) -> bool:
        """A plan in flight samples the last token of a running sequence, or judges drafts."""
        return any(s.num_pending < 0 or self._ending(s) for s in self.running.values())

    def _ending(self, sequence: Sequence) -> bool:
        """Its last token is in flight."""
        return sequence.table.num_tokens + 1 >= sequence.limit and sequence.id not in self._filling

    def _preempt_for(self, growing: list[Sequence]) -> list[Sequence]:
        """Those of `growing` that still run once there is a block for each of them."""
        while len(growing) > self.pool.available:
            offered = [s for s in self.running.values() if s.preemptions < MAX_PREEMPTIONS]
            victim = _asked(self.policy.preempt, offered)
            chosen = [s for s in offered if s is victim]
            if not chosen:
                raise PolicyError(f"preempt chose {_named(victim)}. Choose one on offer")
            chosen[0].preemptions += 1
            self._preempt(chosen[0], f"{len(growing)} blocks needed, {self.pool.available} free")
            growing = [s for s in growing if s is not victim]
        return growing

    def _admit(self, copies: list[BlockCopy]) -> None:
        """Sequences move from waiting to running while slots, blocks and budget allow."""
        if not self.waiting:
            return
        left = self.config.max_num_batched_tokens - (len(self.running) - len(self._filling))
        left -= sum(s.num_pending for s in self._filling.values())
        held: list[Sequence] = []
        try:
            # Looking further down the line is bounded, or a long line would cost every step.
            while (
                self.waiting
                and self._free_slots
                and left > 0
                and len(held) < self.config.max_num_seqs
            ):
                choice = _asked(self.policy.admit, self.waiting)
                if choice is None:
                    break
                place = next((i for i, s in enumerate(self.waiting) if s is choice), None)
                if place is None:
                    raise PolicyError(f"admit chose {_named(choice)}. Choose one on offer")
                sequence = self.waiting[place]
                if self._must_wait(sequence):
                    held.append(self.waiting.pop(place))
                elif self._place(sequence, copies):
                    del self.waiting[place]
                    left -= sequence.num_pending
                else:
                    break
        finally:  # whatever the policy did, nobody is lost from the line
            for sequence in held:
                self._wait(sequence)

    def _must_wait(self, sequence: Sequence) -> bool:
        """A commit that will come decides what this sequence can share, or what its next token is.

        Its own token may be in flight, a sibling may be computing the same prompt, or another
        sequence the next block of the same prefix.
        """
        if sequence.epoch and any(
            row.seq_id == sequence.id and row.num_samples for p in self.ledger for row in p.rows
        ):
            return True
        if self._forks(sequence) and self._fork_source(sequence) is None:
            if any(sibling.slot is not None for sibling in self.requests[sequence.request.id]):
                return True
        return self.sharing.awaited(sequence)

    def _place(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """The sequence has a slot and its blocks, if they and some head-room are free."""
        pool = self.pool
        parent = self._fork_source(sequence)
        shared = self.sharing.cached(sequence)
        span = self._span(sequence, len(sequence.tokens))
        before = sequence.bind.prompt_len - 1  # a fork computes only the last prompt position
        if parent is None:
            claim = pool.claim(span, shared)
        else:
            claim = pool.claim(span) - before // self.config.block_size
        if claim + self._head_room() > pool.available:
            return False
        if parent is None:
            why = "resumed" if sequence.epoch else "new"
            sequence.table = pool.open(sequence.id, span, shared)
        else:
            why = f"forked from {parent.id}"
            sequence.table = pool.fork(parent.id, sequence.id, before)
            copied = pool.grow(sequence.id, span - before).copied
            if copied is not None:
                copies.append(BlockCopy(*copied))
        sequence.committed = sequence.table.num_tokens
        if not sequence.epoch:  # a preempted sequence would find its own blocks
            self.cached_tokens += sequence.committed
            self.queried_tokens += len(sequence.tokens)
            self.begun.append(sequence.request.id)
        self.sharing.claim(sequence)
        sequence.slot = self._free_slots.pop()
        self.running[sequence.id] = self._filling[sequence.id] = sequence
        if self._drafting is not None:
            self._drafting.begin(sequence, self._now())
        self._stand(sequence)
        self._admitted.append(Event(sequence.id, f"{why}, {sequence.committed} tokens shared"))
        return True

    def _now(self) -> Moment:
        return Moment(len(self.running), self._next_step)

    def _stand(self, sequence: Sequence) -> None:
        """The sequence is planned step by step, or may run ahead: its drafts have changed."""
        sequence.plain_to = 0
        if sequence.guide is not None or sequence.num_drafts:
            self._stepwise[sequence.id] = sequence
        else:
            self._stepwise.pop(sequence.id, None)

    def _span(self, sequence: Sequence, end: int) -> int:
        """Positions that its table must cover where `end` of them are known or computed."""
        if sequence.preemptions < MAX_PREEMPTIONS:
            return end
        # With every block it can need it is never a victim again.
        return max(end, sequence.limit - 1)

    def _head_room(self) -> int:
        """Blocks left free at admission so that the newcomer does not push a runner out at once."""
        return min(len(self.running), max(1, self.pool.num_blocks // 100))

    def _forks(self, sequence: Sequence) -> bool:
        """It may begin on a sibling's blocks: it has no output, and no prompt to report on.

        Where one token is all that is asked a sibling ends with the step that computes the prompt,
        so there is nobody to fork from.
        """
        return (
            sequence.num_output == 0
            and sequence.params.prompt_logprobs is None
            and sequence.limit > sequence.bind.prompt_len + 1
        )

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        """A sibling whose blocks hold the whole prompt, committed."""
        if self._forks(sequence):
            for sibling in self.requests[sequence.request.id]:
                if sibling.slot is not None and sibling.committed >= sibling.bind.prompt_len:
                    return sibling
        return None

    def _plan_rows(self, waiting: set[int]) -> list[Row]:
        """Rows of the next plan: decodes in running order, then chunks as the policy splits.

        waiting   sequences that get no row: they found no block, or wait for a commit
        """
        rows: list[Row] = []
        if not (self._filling or waiting or self._stepwise):
            self._plan_decodes(rows, self.running.values())
            return rows
        filling = list(self._filling.values())
        budget = self.config.max_num_batched_tokens
        decodes = [
            s
            for s in self.running.values()
            if s.id not in self._filling
            and s.id not in waiting
            and s.table.num_tokens + 1 < s.limit
        ]
        if not filling:
            self._plan_drafting(rows, decodes, budget - len(decodes))
            return rows
        split = _asked(self.policy.split, budget, len(decodes), filling)
        if not _within(split, budget, len(decodes), filling):
            raise PolicyError(f"split gave {split} of a budget of {budget}. Stay within the offer")
        spent = split.num_decodes + sum(split.chunks)
        self._plan_drafting(rows, decodes[: split.num_decodes], budget - spent)
        for sequence, chunk in zip(filling, split.chunks, strict=True):
            if chunk:
                self._plan_chunk(rows, sequence, chunk)
        return rows

    def _plan_drafting(self, rows: list[Row], sequences: list[Sequence], left: int) -> None:
        """A row for each sequence: with drafts where it may have some, else one more token.

        left   tokens of the budget that drafts may use
        """
        drafting, plain = self._drafting, sequences
        if drafting is not None and self._stepwise:
            plain = []
            for sequence in sequences:
                drafts, masks = self._drafts(drafting, sequence, left)
                if drafts:
                    left -= len(drafts)
                    self._plan_drafts(rows, sequence, drafts, masks)
                else:
                    plain.append(sequence)
        self._plan_decodes(rows, plain)

    def _drafts(
        self, drafting: Drafting, sequence: Sequence, left: int
    ) -> tuple[tuple[Draft, ...], tuple[bytes, ...]]:
        """Drafts for the sequence's next row, as many as budget, limit and blocks allow; masks.

        Nobody is preempted for a draft. Its blocks are taken here, and given back at the commit.
        """
        table, guide, known = sequence.table, sequence.guide, len(sequence.tokens)
        room = table.capacity + self.pool.available * self.config.block_size - known
        most = min(sequence.num_drafts, left, sequence.limit - known - 1, room)
        drafts = drafting.propose(sequence, most) if most > 0 else ()
        masks: tuple[bytes, ...] = ()
        if drafts and guide is not None:
            ahead = guide.ahead(draft for draft in drafts if isinstance(draft, int))
            drafts, masks = drafts[: len(ahead)], (guide.mask, *ahead)
        if drafts:
            grown = self.pool.grow(sequence.id, 1 + len(drafts))
            sequence.told = min(sequence.told, grown.keep)
        return drafts, masks

    def _plan_drafts(
        self,
        rows: list[Row],
        sequence: Sequence,
        drafts: tuple[Draft, ...],
        masks: tuple[bytes, ...],
    ) -> None:
        """The sequence's last token and drafts behind it, all judged in one row."""
        table = sequence.table
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        start = table.num_tokens
        table.num_tokens = start + 1 + len(drafts)
        self.planned_tokens += 1 + len(drafts)
        rows.append(
            Row(
                sequence.id,
                sequence.epoch,
                sequence.slot,
                start,
                (sequence.tokens[start],),
                keep=sequence.told,
                new_blocks=tuple(table.blocks[sequence.told :]),
                num_samples=1 + len(drafts),
                masks=masks,
                drafts=drafts,
            )
        )
        sequence.told = len(table.blocks)

    def _plan_decodes(self, rows: list[Row], sequences: Iterable[Sequence]) -> None:
        """One more token for each sequence whose end is not in flight already. The hot loop."""
        step_before, make, append = self._next_step - 1, tuple.__new__, rows.append
        first = index = len(rows)
        new_blocks: tuple[int, ...]
        tokens: tuple[int, ...]
        refs: tuple[TokenRef, ...]
        for sequence in sequences:
            table, known, guide = sequence.table, sequence.tokens, sequence.guide
            start = table.num_tokens
            end = start + 1
            if end >= sequence.limit:
                continue  # every token it may still get is in flight
            keep, blocks = sequence.told, table.blocks
            if keep == len(blocks):
                new_blocks = ()
            else:
                new_blocks = tuple(blocks[keep:])
                sequence.told = len(blocks)
            if start < len(known):
                tokens, refs = (known[start],), ()
            else:  # the plan before this one samples it
                tokens, refs = (), (make(TokenRef, (step_before, sequence.row)),)
            sequence.row = index
            index += 1
            append(
                make(
                    Row,
                    (
                        sequence.id,
                        sequence.epoch,
                        sequence.slot,
                        start,
                        tokens,
                        refs,
                        keep,
                        new_blocks,
                        1,
                        None,
                        () if guide is None else (guide.mask,),
                        (),
                    ),
                )
            )
            table.num_tokens = end
        self.planned_tokens += index - first

    def _plan_chunk(self, rows: list[Row], sequence: Sequence, count: int) -> None:
        """`count` more tokens of a sequence that is filling; the last of them samples."""
        table = sequence.table
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        start, known = table.num_tokens, len(sequence.tokens)
        end = start + count
        assert end <= known, f"sequence {sequence.id} fills to {end} of {known}"
        bind = None if sequence.told else self._bind(sequence, start)
        samples = int(end == known < sequence.limit)
        if end == known:
            del self._filling[sequence.id]
        if samples:
            sequence.row = len(rows)
        rows.append(
            Row(
                sequence.id,
                sequence.epoch,
                sequence.slot,
                start,
                tuple(sequence.tokens[start:end]),
                (),
                sequence.told,
                tuple(table.blocks[sequence.told :]),
                samples,
                bind,
                (sequence.guide.mask,) if samples and sequence.guide is not None else (),
            )
        )
        sequence.told = len(table.blocks)
        table.num_tokens = end
        if self._drafting is not None:
            self._drafting.follow(sequence, end)
        self.planned_tokens += count

    def _bind(self, sequence: Sequence, start: int) -> Bind:
        """What the device must know to take the sequence over at `start`."""
        untold = start if sequence.params.penalises else 0
        if sequence.params.prompt_logprobs is not None:
            untold = max(untold, sequence.bind.prompt_len)
        return sequence.bind._replace(history=tuple(sequence.tokens[:untold]))

    # Results.

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """What each choice gained from `plan`, the oldest in flight. A late result gains nothing.

        A row whose sequence has ended since is dropped: it computed past a stop, or was aborted. A
        preempted sequence keeps the token in flight, for only its blocks are gone.
        """
        if not self.ledger or self.ledger[0] is not plan:
            assert plan not in self.ledger, f"plan {plan.step} committed out of order"
            return []  # void, or delivered twice
        self.ledger.popleft()
        assert output.step == plan.step, f"plan {plan.step} got the output of {output.step}"
        assert len(output.rows) == len(plan.rows), f"{len(output.rows)} of {len(plan.rows)} rows"
        if self._drafting is not None:
            for seq_id in output.undrafted:  # before any row, for a row publishes what was computed
                self._drafting.lost(seq_id)
        deltas: list[Delta] = []
        gain, make = deltas.append, tuple.__new__
        live, size, vocab_size = self._live, self.config.block_size, self._vocab_size
        for row, result in zip(plan.rows, output.rows, strict=True):
            sequence = live.get(row[0])  # by place: half the cost of .seq_id, for every row
            if sequence is None:
                continue
            tokens, logprobs, _, error, _ = result
            known = sequence.tokens
            end = len(known)
            if (
                end >= sequence.plain_to
                or len(tokens) != 1
                or error is not None
                or tokens[0] in sequence.stop_ids
                or not 0 <= tokens[0] < vocab_size
            ):
                self._commit_row(sequence, row, result, deltas)
                continue
            sequence.committed = end
            if not end % size:
                self.sharing.publish(sequence, end - 1, end)
            known.append(tokens[0])
            gained = (sequence.request.id, sequence.choice, tokens, None, None, logprobs, (), None)
            gain(make(Delta, gained))
        if output.undrafted:
            self._redraft(output.undrafted)
        return deltas

    def _commit_row(
        self, sequence: Sequence, row: Row, result: RowOutput, deltas: list[Delta]
    ) -> None:
        """A result of which anything may come: of a prompt, with drafts, an end or a failure."""
        tokens, error = result.tokens, result.error
        if row.drafts and error is None and 0 < len(tokens) <= row.num_samples:
            deltas.append(self._commit_drafts(sequence, row, result))
            return
        if error is not None or len(tokens) != row.num_samples:
            why = error or f"the model gave {len(tokens)} tokens, {row.num_samples} were planned"
            deltas.append(self._finish(sequence, FinishReason.ERROR, why))
            return
        # A sampled token stands right behind the row's last position.
        end = len(sequence.tokens) if tokens else row.end
        if row.epoch == sequence.epoch:
            start, sequence.committed = sequence.committed, end
            self.sharing.publish(sequence, start, end)
        if tokens:
            deltas.append(self._commit_tokens(sequence, row, result))
        else:
            self._commit_prompt(sequence, row, result.prompt_logprobs, deltas)

    def _commit_prompt(
        self, sequence: Sequence, row: Row, scores: tuple[TokenLogprob, ...], deltas: list[Delta]
    ) -> None:
        """A row without a sample: prompt scores are reported, and max_tokens = 0 may be reached."""
        scores = self._unscored(sequence, row, scores)
        if row.end >= sequence.limit:
            deltas.append(
                self._finish(sequence, FinishReason.LENGTH)._replace(prompt_logprobs=scores)
            )
        elif scores:
            deltas.append(Delta(sequence.request.id, sequence.choice, prompt_logprobs=scores))

    def _unscored(
        self, sequence: Sequence, row: Row, scores: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Scores not reported before: after a preemption the prompt is computed again."""
        fresh = scores[sequence.scored - row.start - 1 :]
        sequence.scored += len(fresh)
        return fresh

    def _commit_tokens(self, sequence: Sequence, row: Row, result: RowOutput) -> Delta:
        """Tokens of which one may be the last, or that came with prompt scores."""
        ending = self._extend(sequence, result.tokens)
        due = sequence.slot is not None and len(sequence.tokens) >= sequence.heed
        if ending.finish is None and self._drafting is not None and due:
            self._drafting.settle(sequence, self._now())
            self._stand(sequence)
        if row.epoch == sequence.epoch and sequence.watch is None:
            sequence.plain_to = 0 if sequence.id in self._stepwise else sequence.heed - 1
        return self._gained(sequence, row, result, ending)

    def _commit_drafts(self, sequence: Sequence, row: Row, result: RowOutput) -> Delta:
        """The drafts that were accepted and the token behind them; the rest is as if never fed."""
        drafting, start, now = self._drafting, row.start, self._now()
        assert drafting is not None, f"row {row} has drafts, and nobody drafts"
        ending = self._extend(sequence, result.tokens)
        judged, accepted = len(result.verified), len(result.tokens) - 1
        self.drafted_tokens += judged
        self.accepted_tokens += accepted
        if row.epoch == sequence.epoch:
            end = start + ending.taken
            kept = self.pool.blocks_for(self._span(sequence, end))
            self.pool.shrink(sequence.id, end, kept)
            sequence.told = min(sequence.told, kept)
            sequence.committed = end
            self.sharing.publish(sequence, start, end)
            drafting.learn(sequence, judged, accepted, now)
            if ending.finish is None:
                drafting.settle(sequence, now)
                self._stand(sequence)
        return self._gained(sequence, row, result, ending)

    def _extend(self, sequence: Sequence, tokens: tuple[int, ...]) -> _Ending:
        """The sequence has the tokens, up to the one that ends it. Stop beats length."""
        min_tokens = sequence.params.min_tokens
        for count, token in enumerate(tokens, 1):
            if not 0 <= token < self._vocab_size:
                why = f"the model sampled token {token}, its vocabulary has {self._vocab_size}"
                return _Ending(count - 1, FinishReason.ERROR, error=why)
            sequence.tokens.append(token)
            if token in sequence.stop_ids and sequence.num_output >= min_tokens:
                return _Ending(count, FinishReason.STOP, token)
            complete = False
            followers = ((BY_STOP, sequence.watch), (BY_STRUCTURE, sequence.guide))
            for name, follower in followers:  # each hears of every token
                try:
                    complete |= follower is not None and follower.feed(token)
                except Exception as fault:  # a fault in one request ends that request alone
                    return _Ending(count, FinishReason.ERROR, error=f"{name}: {fault!r}")
            if complete:
                return _Ending(count, FinishReason.STOP)
            if len(sequence.tokens) >= sequence.limit:
                return _Ending(count, FinishReason.LENGTH)
        return _Ending(len(tokens))

    def _gained(self, sequence: Sequence, row: Row, result: RowOutput, ending: _Ending) -> Delta:
        """What the row's result gives to whoever asked, with the end if it is one."""
        taken, finish, stop_token, error = ending
        if finish is FinishReason.ERROR:
            return self._finish(sequence, finish, error)
        gained = Delta(
            sequence.request.id,
            sequence.choice,
            result.tokens[:taken],
            finish,
            stop_token,
            result.logprobs[:taken],
            self._unscored(sequence, row, result.prompt_logprobs),
        )
        if finish is not None:
            self._finish(sequence, finish)
        return gained

    def _redraft(self, seq_ids: Iterable[int]) -> None:
        """The draft model failed for these: it is told them anew after a rest."""
        assert self._drafting is not None, "nobody drafts"
        for seq_id in seq_ids:
            sequence = self.running.get(seq_id)
            if sequence is not None:
                self._drafting.failed(sequence, self._now())
                self._stand(sequence)

    # Changes of state.

    def void(self, why: str) -> list[Delta]:
        """Every plan in flight is forgotten, as are its results; what runs is computed again.

        Each sequence resumes once under a new epoch with a full table. One that has been through
        this before ends in an error, so a model that always fails ends every request.
        """
        self.ledger.clear()
        deltas = []
        for sequence in list(self._live.values()):
            if sequence.slot is None:
                continue
            if sequence.retried:
                deltas.append(self._finish(sequence, FinishReason.ERROR, why))
            else:
                sequence.retried = True
                self._preempt(sequence, why)
        return deltas

    def resize(self, num_blocks: int) -> None:
        """The pool has `num_blocks` blocks from the next plan on; who held one that goes waits.

        Raises NeverFits and changes nothing when a live request could then not finish alone.
        """
        for sequence in self._live.values():
            blocks = self.pool.blocks_for(max(sequence.limit - 1, len(sequence.tokens)))
            if blocks > num_blocks:
                raise NeverFits(
                    "num_blocks",
                    f"request {sequence.request.id} needs {blocks} blocks, {num_blocks} asked for",
                    f"Give {blocks} or more, or abort the request",
                )
        for sequence in list(self.running.values()):
            if max(sequence.table.blocks) >= num_blocks:
                self._preempt(sequence, f"pool resized to {num_blocks} blocks")
        self.pool.resize(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Nothing committed so far is shared with requests to come."""
        self.pool.reset_cache()
        if self._drafting is not None:
            self._drafting.reset_prefix_cache()

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def _preempt(self, sequence: Sequence, why: str) -> None:
        """The sequence waits without slot or block. Its tokens stay, also the one in flight."""
        self._withdraw(sequence)
        self.preemptions += 1
        self._preempted.append(Event(sequence.id, why))
        self._wait(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
        """The sequence is nowhere any more; this Delta is its last."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._withdraw(sequence)
        del self._live[sequence.id]
        choices = self.requests[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self.requests[sequence.request.id]
        self._finished.append(Event(sequence.id, error or reason.value))
        return Delta(sequence.request.id, sequence.choice, finish=reason, error=error)

    def _withdraw(self, sequence: Sequence) -> None:
        """The one way out of running: slot, blocks and claims on the prefix are given back."""
        del self.running[sequence.id]
        self._filling.pop(sequence.id, None)
        self._stepwise.pop(sequence.id, None)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.id)
        self.sharing.disclaim(sequence)
        sequence.slot = None
        sequence.committed = sequence.told = sequence.plain_to = 0
        sequence.epoch += 1
