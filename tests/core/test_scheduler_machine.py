"""Every order of events on the real scheduler, pool and hash model: two state machines.

Hypothesis chooses the events, the audit of forge/invariants.py recomputes the state after each,
and every choice that ends is compared with the sequential reference. Small worlds find more: blocks
of 1 to 4 tokens, a dozen of them, two prompt tokens, so that prefixes are always shared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forge.blocks import BlockPool, chain_hash, root_hash
from forge.config import EngineConfig, HostTier, LoadCosts
from forge.errors import (
    BlocksInUse,
    CacheError,
    ContextTooLong,
    DuplicateRequest,
    DuplicateSequence,
    InvalidRequest,
    NeverFits,
    OutOfBlocks,
    UnknownSequence,
)
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.paged import FaultHooks
from forge.policy import FCFS, Candidate, PolicyContext, Split
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import PendingStep, StepOutput, StepPlan
from tests.core.reference import compute_expected
from tests.core.worlds import (
    ALLOWED_PREEMPTIONS,
    DISK,
    ChoiceResult,
    FaultyStore,
    PlanAudit,
    audit,
    audit_drained,
    audit_pool,
    chain_of,
    check_choice,
    snapshot,
    tokens_in_flight,
)

POISON = 4
"""Rows of a prompt that begins with this token fail once the context has six tokens."""
PLANTED_ERRORS = (
    "broken row",
    "given up",
    "the model failed",
    "the model's logits are not finite: NaN",
    "the model's logits are not finite at a prompt position",
)
LONGEST = 18

picks = st.sampled_from(range(6))
seldom = st.sampled_from((False,) * 9 + (True,))
prompts = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=8).map(tuple)
drafts = st.builds(
    Request,
    st.just(0),
    prompts,
    st.builds(
        SamplingParams,
        n=st.sampled_from((1, 1, 1, 2, 3)),
        temperature=st.sampled_from((0.0, 1.0)),
        repetition_penalty=st.sampled_from((1.0, 1.0, 1.3)),
        seed=st.sampled_from((None, 7)),
        max_tokens=st.sampled_from((0, 1, 2, 4, 8, 8, 8, 12, None)),
        stop_token_ids=st.sampled_from(((), (), (3,))),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from((None, None, None, 1)),
        prompt_logprobs=st.sampled_from((None, None, None, 1)),
    ),
    priority=st.sampled_from((0, 0, 1)),
    cache_salt=st.sampled_from(("", "", "salt")),
)


def with_poison(request: Request) -> Request:
    """Return the request with a prompt that fails."""
    return replace(request, prompt=(POISON, *request.prompt))


class InFlightStep(NamedTuple):
    """A plan that the model has accepted, and its step."""

    plan: StepPlan
    step: PendingStep


class SchedulerMachine(RuleBasedStateMachine):
    """Events on one scheduler and one model. `reached` counts events over all examples."""

    def __init__(self, reached: Counter[str]) -> None:
        super().__init__()
        self.reached = reached

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 4),
        rows=st.integers(1, 5),
        more_budget=st.sampled_from((0, 1, 3, 30)),
        depth=st.sampled_from((1, 2, 2)),
        caching=st.sampled_from((True, True, False)),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        rows: int,
        more_budget: int,
        depth: int,
        caching: bool,
    ) -> None:
        self.create(
            EngineConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=rows,
                max_num_batched_tokens=rows + more_budget,
                max_model_len=LONGEST,
                depth=depth,
                enable_prefix_caching=caching,
            )
        )

    def create(self, config: EngineConfig) -> None:
        """Create the scheduler, its model and the oracle."""
        self.config = config
        num_blocks, block_size = config.num_blocks, config.block_size
        self.oracle = HashModel(vocab_size=5, num_blocks=num_blocks, block_size=block_size)
        self.model = LogitsModel(
            self.logits,
            vocab_size=5,
            eos_token=0,
            num_blocks=num_blocks,
            block_size=block_size,
            faults=FaultHooks(result=self.errors),
            files=self.create_files(config),
        )
        policy = FCFS._replace(preempt=self.preempt, split=self.split)
        self.scheduler = Scheduler(self.config, 5, (0,), policy)
        self.plan_audit = PlanAudit(self.scheduler)
        self.flights: deque[InFlightStep] = deque()
        self.done: list[tuple[StepPlan, StepOutput]] = []
        self.requests: list[Request] = []
        self.longest: dict[int, int] = {}
        self.choices: dict[tuple[int, int], ChoiceResult] = {}
        self.victims: list[int] = []
        self.broken_row: int | None = None
        self.idle = False
        self.meaning: dict[bytes, tuple[str, tuple[int, ...]]] = {}

    def create_files(self, config: EngineConfig) -> FileMoves | None:
        """Return the model's files: none."""
        return None

    def waits_for_files(self, chain: Sequence[bytes]) -> bool:
        """Return whether a sequence with this chain may wait for files."""
        return False

    def logits(self, context: Sequence[int]) -> list[float]:
        if context[0] == POISON and len(context) >= 6:
            return [nan] * 5
        return self.oracle.context_logits(context)

    def errors(self, plan: StepPlan) -> Mapping[int, str]:
        if self.broken_row is None or not plan.rows:
            return {}
        return {self.broken_row % len(plan.rows): "broken row"}

    def preempt(self, offered: Sequence[Candidate], context: PolicyContext) -> Candidate:
        """Recompute the default choice: priority class, fewest output tokens, higher id (I25)."""
        running = self.scheduler.running.values()
        assert list(offered) == [s for s in running if s.num_preemptions < ALLOWED_PREEMPTIONS]
        assert len(running) > 1, "a sequence that runs alone was offered as the victim"
        coming, filling = tokens_in_flight(self.scheduler), self.scheduler._prefilling
        for s in running:
            length = len(s.tokens) + len(coming.get(s.id, ()))
            assert length < s.max_len or s.id in filling, "an end in flight frees blocks at once"
        lowest = max(s.request.priority for s in offered)
        lowest_class = [s for s in offered if s.request.priority == lowest]
        fewest = min(s.num_output for s in lowest_class)
        chosen = FCFS.preempt(offered, context)
        assert chosen.id == max(s.id for s in lowest_class if s.num_output == fewest)
        self.victims.append(chosen.id)
        return chosen

    def split(
        self, budget: int, num_decodes: int, filling: Sequence[Candidate], context: PolicyContext
    ) -> Split:
        """Return the default split, or an empty one when `dispatch` plans an idle step."""
        if self.idle and self.scheduler.ledger:
            self.reached["idle splits"] += 1
            return Split(0, (0,) * len(filling))
        return FCFS.split(budget, num_decodes, filling, context)

    # Events.

    def working(self) -> bool:
        return self.scheduler.has_work

    @rule(drafts=st.lists(st.tuples(drafts, seldom), min_size=1, max_size=3))
    def submit(self, drafts: list[tuple[Request, bool]]) -> None:
        for draft, breaks in drafts:
            request = with_poison(draft) if breaks else draft
            self.submit_one(replace(request, id=len(self.requests)))

    def submit_one(self, request: Request) -> None:
        prompt_len, params = len(request.prompt), request.params
        positions = self.scheduler.pool.num_blocks * self.config.block_size
        least = prompt_len + (1 if params.max_tokens is None else params.max_tokens)
        if least > LONGEST:
            self.check_refusal(request, ContextTooLong)
        elif max(prompt_len, least - 1) > positions:
            self.check_refusal(request, NeverFits)
        else:
            self.scheduler.add(request)
            self.requests.append(request)
            self.longest[request.id] = min(LONGEST, positions + 1)
            self.choices.update(
                {(request.id, choice): ChoiceResult() for choice in range(params.n)}
            )
            self.reached["submitted"] += 1

    def check_refusal(self, request: Request, error: type[InvalidRequest]) -> None:
        """Check that the scheduler refuses the request with this error, unchanged (I30)."""
        before = snapshot(self.scheduler)
        with pytest.raises(error):
            self.scheduler.add(request)
        assert snapshot(self.scheduler) == before
        self.reached[f"refused {error.__name__}"] += 1

    @precondition(lambda self: self.scheduler.requests)
    @rule(pick=picks)
    def submit_a_live_id_again(self, pick: int) -> None:
        live = list(self.scheduler.requests)
        self.check_refusal(Request(live[pick % len(live)], (1,)), DuplicateRequest)

    @precondition(working)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        """Abort a request, ended ones included. The second of two aborts changes nothing (I12)."""
        live = list(self.scheduler.requests)
        coming = tokens_in_flight(self.scheduler)
        computing = [
            self.scheduler.sequences[i].request.id for i in coming if i in self.scheduler.sequences
        ]
        picked = [*computing[:2], *live[-2:], self.requests[-1].id, self.requests[0].id]
        request_id = picked[pick % len(picked)]
        open_choices = len(self.scheduler.requests.get(request_id, ()))
        computed = any(s.id in coming for s in self.scheduler.requests.get(request_id, ()))
        deltas = self.scheduler.abort(request_id)
        assert len(deltas) == open_choices
        self.check_deltas(deltas)
        self.reached["aborted"] += bool(deltas)
        self.reached["aborted in flight"] += computed
        before = snapshot(self.scheduler)
        assert self.scheduler.abort(request_id) == []
        assert snapshot(self.scheduler) == before

    def can_dispatch(self) -> bool:
        return self.scheduler.has_work and len(self.flights) < self.config.depth

    @precondition(can_dispatch)
    @rule(idle=st.booleans())
    def dispatch(self, idle: bool) -> None:
        self.idle = idle
        plan = self.schedule()
        self.idle = False
        if plan is not None:
            self.flights.append(InFlightStep(plan, self.model.forward(plan)))

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self) -> None:
        flight = self.flights.popleft()
        output = flight.step.result()
        self.done.append((flight.plan, output))
        self.reached["rows with errors"] += sum(row.error is not None for row in output.rows)
        self.check_deltas(self.scheduler.commit(flight.plan, output))

    @precondition(lambda self: self.flights)
    @rule(row=picks)
    def complete_with_a_broken_row(self, row: int) -> None:
        self.broken_row = row
        self.complete()
        self.broken_row = None

    @precondition(working)
    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        """Step like the engine: plan ahead as far as depth allows, then commit the oldest."""
        for _ in range(count):
            before = len(self.flights)
            if self.can_dispatch():
                self.dispatch(idle=False)
            if self.flights and len(self.flights) in (before, self.config.depth):
                self.complete()
            self.check_state()

    # Rules are picked evenly: without these most of a run consists of events between steps.
    step_again = step
    complete_again = complete
    dispatch_again = dispatch

    @precondition(lambda self: self.flights)
    @rule(planned_next=st.booleans())
    def lose_the_steps_in_flight(self, planned_next: bool) -> None:
        """Let the model raise, on the oldest result or the next plan: plans in flight are void."""
        if planned_next and self.can_dispatch():
            self.schedule()
        self.done += [(flight.plan, flight.step.result()) for flight in self.flights]
        self.flights.clear()
        self.check_deltas(self.scheduler.void("the model failed"))
        self.reached["voids"] += 1

    @precondition(lambda self: self.done)
    @rule(pick=picks)
    def deliver_a_result_again(self, pick: int) -> None:
        """Commit a result a second time, or that of a void plan: it changes nothing (I29)."""
        before = snapshot(self.scheduler)
        assert self.scheduler.commit(*self.done[pick % len(self.done)]) == []
        assert snapshot(self.scheduler) == before
        self.reached["delivered again"] += 1

    @precondition(working)
    @rule(more=st.sampled_from((-1, 0, 0, 12)))
    def resize(self, more: int) -> None:
        """Resize to exactly what the longest live request needs, a little more, or too little."""
        live = self.scheduler.sequences.values()
        spans = [max(s.max_len - 1, len(s.tokens)) for s in live]
        least = self.scheduler.pool.num_blocks_for(max(spans, default=1))
        before, events = snapshot(self.scheduler), len(self.scheduler._preempted_events)
        if more < 0 and least > 1:
            with pytest.raises(NeverFits):
                self.scheduler.resize(least - 1)
            assert snapshot(self.scheduler) == before
            self.reached["refused resize"] += 1
            return
        self.scheduler.resize(least + max(0, more))
        self.reached["resized"] += 1
        self.reached["preempted by resize"] += len(self.scheduler._preempted_events) - events

    @precondition(working)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert not self.scheduler.pool.lookup(self.meaning)

    @precondition(working)
    @rule()
    def drain(self) -> None:
        limit = (
            2
            * sum(
                (2 + ALLOWED_PREEMPTIONS) * s.max_len
                for group in self.scheduler.requests.values()
                for s in group
            )
            + self.config.depth
        )
        for _ in range(limit):
            if not self.scheduler.has_work and not self.flights:
                break
            self.step(1)
        assert not self.scheduler.has_work and not self.flights, f"not drained in {limit} steps"
        audit_drained(self.scheduler)
        assert all(choice.finish is not None for choice in self.choices.values())

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.drain()

    # Checks.

    def schedule(self) -> StepPlan | None:
        """Return the next plan, after checking the victims and admissions of this call."""
        scheduler = self.scheduler
        preempted, admitted = len(scheduler._preempted_events), len(scheduler._admitted_events)
        self.victims.clear()
        plan = scheduler.schedule()
        if plan is None:
            assert self.flights, "nothing to wait for, and nothing planned"
            told_preempted, told_admitted = scheduler._preempted_events, scheduler._admitted_events
        else:
            told_preempted, told_admitted = list(plan.preempted), list(plan.admitted)
            self.plan_audit(plan)
        out = [event.seq_id for event in told_preempted[preempted:]]
        new = told_admitted[admitted:]
        assert out == self.victims and len(set(out)) == len(out)
        assert not (out and new), "one step preempts and admits (I24)"
        self.reached["preempted"] += len(out)
        self.reached["preempted in flight"] += len(tokens_in_flight(scheduler).keys() & set(out))
        for event in new:
            self.check_admission(event.seq_id, event.why)
            self.check_overtaking(event.seq_id)
        return plan

    def check_overtaking(self, seq_id: int) -> None:
        """Check that each sequence still ahead in the queue waits for a coming commit (I27)."""
        pool, coming = self.scheduler.pool, tokens_in_flight(self.scheduler)
        newcomer = self.scheduler.running[seq_id]
        computing = {
            block_hash
            for s in self.scheduler.running.values()
            for block_hash in chain_of(self.scheduler, s)[1:]
            if block_hash not in pool._block_by_hash
        }
        for s in self.scheduler.waiting:
            siblings = self.scheduler.requests[s.request.id]
            missing = [h for h in chain_of(self.scheduler, s)[1:] if h not in pool._block_by_hash]
            assert (
                s.queue_key > newcomer.queue_key
                or s.id in coming
                or any(sibling.slot is not None for sibling in siblings)
                or (missing and missing[0] in computing)
                or self.waits_for_files(chain_of(self.scheduler, s))
            ), f"sequence {seq_id} overtakes {s.id}"

    def check_admission(self, seq_id: int, why: str) -> None:
        """Check that shared blocks have the right content and that a token is computed (I6, I9)."""
        s = self.scheduler.running[seq_id]
        how, _, shared = why.removesuffix(" tokens shared").rpartition(", ")
        self.reached[how.split()[0]] += 1
        self.reached["prefix hits"] += int(shared) > 0 and not how.startswith("forked")
        assert int(shared) < len(s.tokens)
        assert int(shared) == 0 or s.params.prompt_logprobs is None
        for index in range(int(shared) // self.config.block_size):
            block = s.table.blocks[index]
            if not how.startswith("forked"):
                assert (
                    self.scheduler.pool._hash_by_block[block]
                    == chain_of(self.scheduler, s)[index + 1]
                )

    def check_deltas(self, deltas: list[Delta]) -> None:
        """Check that each choice ends once, with nothing after (I19), like the reference (I28)."""
        for delta in deltas:
            choice = self.choices[delta.request_id, delta.choice]
            choice.add(delta)
            if choice.finish is not None:
                request = self.requests[delta.request_id]
                longest = self.longest[request.id]
                want = compute_expected(
                    self.oracle, self.config, request, delta.choice, max_len=longest
                )
                why = check_choice(choice, want, f"{request}, choice {delta.choice}")
                self.reached[f"ended by {why}"] += 1
                if choice.finish is FinishReason.ERROR:
                    assert delta.error in PLANTED_ERRORS

    @invariant()
    def check_state(self) -> None:
        scheduler, pool, size = self.scheduler, self.scheduler.pool, self.config.block_size
        audit(scheduler)
        assert [flight.plan for flight in self.flights] == list(scheduler.ledger)
        for s in scheduler.sequences.values():
            for index, block_hash in enumerate(chain_of(scheduler, s)[1:]):
                prefix = (s.request.cache_salt, tuple(s.tokens[: (index + 1) * size]))
                assert self.meaning.setdefault(block_hash, prefix) == prefix, "one hash for two"
        for block, block_hash in pool._hash_by_block.items():
            _, tokens = self.meaning[block_hash]
            assert tuple(self.model._decoder.pages()[block]) == tokens[-size:], f"block {block}"


class AvailableBlocks(NamedTuple):
    """Available blocks before an operation, cached ones in the order of eviction."""

    free: list[int]
    cached: list[int]


class PoolMachine(RuleBasedStateMachine):
    """The pool alone, compared with contents: pages of tokens, changed only by the pool's results.

    contents   tokens that each table must read back from its blocks
    pages      tokens that were written into each block
    """

    def __init__(self, reached: Counter[str]) -> None:
        super().__init__()
        self.reached = reached

    @initialize(num_blocks=st.integers(4, 16), block_size=st.integers(1, 3))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.root = root_hash("", "", block_size)
        self.pages: dict[int, list[int | None]] = {}
        self.contents: dict[int, list[int]] = {}
        self.meaning: dict[bytes, list[int]] = {}
        self.next_id = 0

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return one hash per full block of `tokens`."""
        size, found, parent = self.pool.block_size, [], self.root
        for end in range(size, len(tokens) + 1, size):
            parent = chain_hash(parent, tokens[end - size : end])
            found.append(parent)
            self.meaning[parent] = list(tokens[end - size : end])
        return found

    def seq_id(self, pick: int) -> int:
        """Return one of the open tables, the last first; now and then an id without a table."""
        ids = list(self.contents)[::-1]
        return ids[pick % len(ids)] if ids and pick else self.next_id

    def check_refusal(self, error: type[CacheError], call: Callable[[], object]) -> None:
        before = snapshot(self.pool)
        with pytest.raises(error):
            call()
        assert snapshot(self.pool) == before
        self.reached[error.__name__] += 1

    def check_take_order(self, before: AvailableBlocks) -> None:
        """Check that free blocks went first, then cached ones in LRU order (I8)."""
        evicted = [block for block in before.cached if self.pool._hash_by_block.get(block) is None]
        revived = [
            b for b in before.cached if b not in evicted and b not in self.pool._cached_blocks
        ]
        unused = [block for block in before.cached if block not in revived]
        assert evicted == unused[: len(evicted)]
        assert not evicted or not set(before.free) & set(self.pool._empty_blocks)
        self.reached["evicted"] += len(evicted)

    @rule(
        tokens=st.lists(st.sampled_from((1, 1, 2)), min_size=1, max_size=8),
        more=st.integers(0, 2),
        computed=st.sampled_from((True, True, False)),
    )
    def open(self, tokens: list[int], more: int, computed: bool) -> None:
        """Open a table over `tokens` and some more, on the published blocks of its prefix."""
        hashes = self.hashes(tokens)
        shared = self.pool.lookup(hashes)
        assert [self.pool._hash_by_block[block] for block in shared] == hashes[: len(shared)]
        assert len(shared) == len(hashes) or hashes[len(shared)] not in self.pool._block_by_hash
        span, before = (
            len(tokens) + more,
            AvailableBlocks(list(self.pool._empty_blocks), list(self.pool._cached_blocks)),
        )
        claim = self.pool.num_blocks_to_open(span, shared)
        if claim > self.pool.num_free_blocks:
            self.check_refusal(OutOfBlocks, lambda: self.pool.open(self.next_id, span, shared))
            return
        available = self.pool.num_free_blocks
        table = self.pool.open(self.next_id, span, shared)
        assert available - self.pool.num_free_blocks == claim
        assert table.num_tokens == len(shared) * self.pool.block_size
        assert table.capacity >= span and table.blocks[: len(shared)] == shared
        self.contents[self.next_id] = tokens[: table.num_tokens]
        self.check_take_order(before)
        self.reached["prefix hits"] += bool(shared)
        if computed:
            start, table.num_tokens = table.num_tokens, len(tokens)
            self.put(self.next_id, start, tokens[start:])
            self.publish_full_blocks(self.next_id)
        self.next_id += 1

    @precondition(lambda self: self.contents)
    @rule(pick=picks)
    def open_twice(self, pick: int) -> None:
        seq_id = self.seq_id(pick)
        if seq_id in self.contents:
            self.check_refusal(DuplicateSequence, lambda: self.pool.open(seq_id, 1))
            self.check_refusal(DuplicateSequence, lambda: self.pool.fork(seq_id, seq_id, 0))

    @rule(pick=picks, tokens=st.lists(st.sampled_from((1, 2)), max_size=5), appending=st.booleans())
    def write(self, pick: int, tokens: list[int], appending: bool) -> None:
        """Grow by `tokens`, in blocks that no other table shares, then write the tokens (I4)."""
        pool, seq_id = self.pool, self.seq_id(pick)
        call = pool.append if appending else pool.grow
        if seq_id not in self.contents:
            self.check_refusal(UnknownSequence, lambda: call(seq_id, len(tokens)))
            return
        table, before = (
            pool.tables[seq_id],
            AvailableBlocks(list(pool._empty_blocks), list(pool._cached_blocks)),
        )
        old, start = list(table.blocks), table.num_tokens
        first = start // pool.block_size
        lacks = max(0, pool.num_blocks_for(start + len(tokens)) - len(old))
        assert pool.num_blocks_to_grow(seq_id, len(tokens)) == lacks
        copies = first < len(old) and (
            pool._ref_counts[old[first]] > 1 or old[first] in pool._hash_by_block
        )
        if lacks + copies > pool.num_free_blocks:
            self.check_refusal(OutOfBlocks, lambda: call(seq_id, len(tokens)))
            return
        grown = call(seq_id, len(tokens))
        assert (grown.copy is not None) == copies
        assert [*old[: grown.keep], *grown.new_blocks] == table.blocks
        assert grown.keep == (first if copies else len(old))
        if grown.copy is not None:
            source, target = grown.copy
            assert (source, target) == (old[first], table.blocks[first])
            self.pages[target] = list(self.pages.get(source, [None] * pool.block_size))
        self.reached["copied"] += copies
        self.check_take_order(before)
        if appending:
            assert table.num_tokens == start + len(tokens)
        else:
            assert table.num_tokens == start
            table.num_tokens += len(tokens)
        self.put(seq_id, start, tokens)

    def put(self, seq_id: int, start: int, tokens: list[int]) -> None:
        """Write tokens through the table as a model would, where no other table reads (I4)."""
        pool, blocks = self.pool, self.pool.tables[seq_id].blocks
        for position, token in enumerate(tokens, start):
            block = blocks[position // pool.block_size]
            assert pool._ref_counts[block] == 1 and block not in pool._hash_by_block
            page = self.pages.setdefault(block, [None] * pool.block_size)
            page[position % pool.block_size] = token
        self.contents[seq_id] += tokens

    @rule(pick=picks, fewer=st.sampled_from((0, 1, 1, 2, 5)), replacing=st.booleans())
    def fork(self, pick: int, fewer: int, replacing: bool) -> None:
        """Fork a table at a prefix of the parent, which is released if `replacing`."""
        seq_id, child = self.seq_id(pick), self.next_id
        if seq_id not in self.contents:
            self.check_refusal(UnknownSequence, lambda: self.pool.fork(seq_id, child + 1, 0))
            return
        num_tokens = max(0, len(self.contents[seq_id]) - fewer)
        available = self.pool.num_free_blocks
        self.pool.fork(seq_id, child, num_tokens)
        assert self.pool.num_free_blocks == available
        self.contents[child] = self.contents[seq_id][:num_tokens]
        self.next_id += 1
        self.reached["forked"] += 1
        if replacing:
            self.release_table(seq_id)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.release_table(self.seq_id(pick))

    def release_table(self, seq_id: int) -> None:
        """Release a table, twice like once (I12). The end of a chain is evicted first."""
        blocks = list(self.pool.tables[seq_id].blocks) if seq_id in self.contents else []
        cached = list(self.pool._cached_blocks)
        self.pool.release(seq_id)
        self.contents.pop(seq_id, None)
        unheld = [block for block in reversed(blocks) if not self.pool._ref_counts[block]]
        assert list(self.pool._cached_blocks) == cached + [
            b for b in unheld if b in self.pool._hash_by_block
        ]
        before = snapshot(self.pool)
        self.pool.release(seq_id)
        assert snapshot(self.pool) == before

    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        if self.seq_id(pick) in self.contents:
            self.publish_full_blocks(self.seq_id(pick))

    def publish_full_blocks(self, seq_id: int) -> None:
        """Publish the full blocks. Of two blocks with the same content the first is found."""
        blocks = self.pool.tables[seq_id].blocks
        for block, block_hash in zip(blocks, self.hashes(self.contents[seq_id]), strict=False):
            known = self.pool._block_by_hash.get(block_hash, block)
            self.pool.publish(block, block_hash)
            assert self.pool.lookup([block_hash]) == [known]
            self.reached["published"] += 1

    @precondition(lambda self: self.contents)
    @rule(num_blocks=st.integers(3, 12))
    def resize(self, num_blocks: int) -> None:
        used = [b for b in range(self.pool.num_blocks) if self.pool._ref_counts[b]]
        if used and used[-1] >= num_blocks:
            self.check_refusal(BlocksInUse, lambda: self.pool.resize(num_blocks))
            return
        cached = [block for block in self.pool._cached_blocks if block < num_blocks]
        self.pool.resize(num_blocks)
        assert self.pool.num_blocks == num_blocks and list(self.pool._cached_blocks) == cached
        self.reached["resized"] += 1

    @rule(really=seldom)
    def reset_cache(self, really: bool) -> None:
        if really:
            self.pool.reset_cache()
            assert not self.pool.lookup(self.meaning) and self.pool.num_cached_blocks == 0

    @invariant()
    def check_state(self) -> None:
        """Check the audit, that every table reads its tokens, and that every hash is right (I6)."""
        pool, size = self.pool, self.pool.block_size
        audit_pool(pool)
        assert pool.tables.keys() == self.contents.keys()
        slack = 0
        for seq_id, table in pool.tables.items():
            read = [self.pages[table.blocks[p // size]][p % size] for p in range(table.num_tokens)]
            assert read == self.contents[seq_id], f"table {seq_id}"
            slack += len(table.blocks) * size - table.num_tokens
        assert pool.num_unused_positions == slack
        for block, block_hash in pool._hash_by_block.items():
            assert self.pages[block] == self.meaning[block_hash], f"block {block}"

    def teardown(self) -> None:
        for seq_id in list(self.contents):
            self.pool.release(seq_id)
        audit_pool(self.pool)
        assert self.pool.num_used_blocks == 0 and not any(self.pool._ref_counts)


class HostMachine(SchedulerMachine):
    """The same events with a host pool: blocks are stored, lost, loaded and resized away."""

    @initialize(
        num_blocks=st.integers(5, 10),
        block_size=st.integers(1, 3),
        rows=st.integers(1, 4),
        more_budget=st.sampled_from((0, 3, 30)),
        depth=st.sampled_from((1, 2, 2)),
        host_tier=st.builds(
            HostTier,
            num_blocks=st.sampled_from((0, 1, 3, 12, 30, 30)),
            max_moved_blocks=st.sampled_from((1, 1, 4, None)),
            min_clean_percent=st.sampled_from((30, 100, 100)),
            min_touches=st.sampled_from((1, 1, 2)),
            min_loaded_blocks=st.sampled_from((1, 1, 2)),
            costs=st.sampled_from((None, None, LoadCosts(3, 2, 1))),
            disk=st.sampled_from((None, DISK, DISK)),
        ),
        store_seed=st.integers(0, 7),
    )
    def build(  # type: ignore[override]  # the arguments are drawn
        self,
        num_blocks: int,
        block_size: int,
        rows: int,
        more_budget: int,
        depth: int,
        host_tier: HostTier,
        store_seed: int,
    ) -> None:
        self.store_seed = store_seed
        self.create(
            EngineConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=rows,
                max_num_batched_tokens=rows + more_budget,
                max_model_len=LONGEST,
                depth=depth,
                host_tier=host_tier,
            )
        )

    def create_files(self, config: EngineConfig) -> FileMoves | None:
        store = FaultyStore(self.store_seed)
        return FileMoves(store, lateness=store.lateness)

    def waits_for_files(self, chain: Sequence[bytes]) -> bool:
        return not self.scheduler.disk_cache._fetching.isdisjoint(chain)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 30), max_tokens=st.sampled_from((1, 2, 6)), count=st.integers(1, 2))
    def submit_a_next_turn(self, pick: int, max_tokens: int, count: int) -> None:
        """Submit requests that go on with the context of earlier ones."""
        for index in range(pick, pick + count):
            earlier = self.requests[index % len(self.requests)]
            room = self.scheduler.pool.num_blocks * self.config.block_size - max_tokens
            context = (*earlier.prompt, *self.choices[earlier.id, 0].tokens)[: min(12, room)]
            if room < 1:
                continue
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            turn = Request(len(self.requests), context, params, cache_salt=earlier.cache_salt)
            self.submit_one(turn)

    submit_another_turn = submit_a_next_turn

    @precondition(SchedulerMachine.working)
    @rule(num_host_blocks=st.sampled_from((0, 1, 5, 30, 30, 30)), really=seldom)
    def resize_host(self, num_host_blocks: int, really: bool) -> None:
        if not really and not self.scheduler.host_cache.loading_seq_ids:
            return
        self.resize_host_to(num_host_blocks)

    def resize_host_to(self, num_host_blocks: int) -> None:
        loading = self.scheduler.host_cache.loading_seq_ids
        self.scheduler.resize_host(num_host_blocks)
        stopped = set(loading) - set(self.scheduler.host_cache.loading_seq_ids)
        self.reached["preempted by a resize of the host pool"] += len(stopped)

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None:
            self.reached["stores"] += len(plan.stores)
            self.reached["loads"] += len(plan.loads)
            self.reached["fetches"] += len(plan.fetches)
            self.reached["loads alongside rows"] += bool(plan.loads and plan.rows)
        return plan

    @invariant()
    def check_host(self) -> None:
        """Check that each held host block has the tokens of its hash (I15)."""
        host, size = self.scheduler.host_cache, self.config.block_size
        contents = self.model._host_blocks.contents
        for host_block, block_hash in host._hash_by_block.items():
            _, tokens = self.meaning[block_hash]
            content = contents[host_block]
            assert content is not None, host_block
            assert tuple(memoryview(content).cast("i")) == tokens[-size:], host_block


def run_machine(
    machine: type[SchedulerMachine] | type[PoolMachine], examples: int, steps: int
) -> Counter[str]:
    """Return what `examples` runs of up to `steps` events reached."""
    reached: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: machine(reached),  # type: ignore[arg-type]  # called, as a class would be
        settings=settings(
            max_examples=examples, stateful_step_count=steps, report_multiple_bugs=False
        ),
    )
    print(dict(reached))
    return reached


SCHEDULER_EVENTS = (
    "new",
    "resumed",
    "forked",
    "prefix hits",
    "preempted",
    "preempted in flight",
    "preempted by resize",
    "resized",
    "refused resize",
    "refused NeverFits",
    "refused ContextTooLong",
    "refused DuplicateRequest",
    "aborted",
    "aborted in flight",
    "delivered again",
    "voids",
    "rows with errors",
    "ended by length",
    "ended by eos",
    "ended by stop id",
    "ended by abort",
    "ended by error",
)
HOST_EVENTS = (
    "stores",
    "loads",
    "fetches",
    "loads alongside rows",
    "preempted",
    "voids",
    "aborted in flight",
)
POOL_EVENTS = (
    "prefix hits",
    "published",
    "forked",
    "copied",
    "evicted",
    "resized",
    "OutOfBlocks",
    "UnknownSequence",
    "DuplicateSequence",
    "BlocksInUse",
)


# Shrinking a failure takes longer than a test may: a run that passes takes seconds.
@pytest.mark.long
@pytest.mark.timeout(400)
def test_few_orders_of_events_break_no_invariant_of_the_scheduler() -> None:
    reached = run_machine(SchedulerMachine, 4, 40)
    assert reached["preempted"] and reached["prefix hits"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_few_orders_of_events_break_no_invariant_with_a_host_pool() -> None:
    reached = run_machine(HostMachine, 6, 40)
    assert reached["stores"] and reached["loads"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_few_orders_of_operations_break_no_invariant_of_the_pool() -> None:
    reached = run_machine(PoolMachine, 30, 50)
    assert reached["published"] and reached["evicted"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_order_of_events_breaks_an_invariant_of_the_scheduler() -> None:
    reached = run_machine(SchedulerMachine, 20, 40)
    assert not [event for event in SCHEDULER_EVENTS if not reached[event]]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_order_of_events_breaks_an_invariant_with_a_host_pool() -> None:
    reached = run_machine(HostMachine, 30, 50)
    assert not [event for event in HOST_EVENTS if not reached[event]]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_order_of_operations_breaks_an_invariant_of_the_pool() -> None:
    reached = run_machine(PoolMachine, 120, 50)
    assert not [event for event in POOL_EVENTS if not reached[event]]


@pytest.mark.soak
def test_no_order_of_events_breaks_an_invariant_of_the_scheduler_in_the_long_run() -> None:
    reached = run_machine(SchedulerMachine, 10_000, 100)
    assert not [event for event in SCHEDULER_EVENTS if reached[event] < 100]


@pytest.mark.soak
def test_no_order_of_events_breaks_an_invariant_with_a_host_pool_in_the_long_run() -> None:
    reached = run_machine(HostMachine, 10_000, 100)
    assert not [event for event in HOST_EVENTS if reached[event] < 100]


@pytest.mark.soak
def test_no_order_of_operations_breaks_an_invariant_of_the_pool_in_the_long_run() -> None:
    reached = run_machine(PoolMachine, 20_000, 100)
    assert not [event for event in POOL_EVENTS if reached[event] < 100]
