"""Iteration-level scheduling: which positions of which sequences the next plan computes.

Owns the queues, the slots and the sequences; drives the BlockPool. Knows no model, tokenizer or
clock: `schedule()` reads only scheduler state, and `commit()` also the output of a step. The same
calls make the same plans.

    add ──► waiting ──admit──► running ──commit──► finished
               ▲                  │
               └──── preempt ─────┘      its blocks are freed, its tokens stay; it is recomputed

`schedule()` allocates blocks for decodes (preempting where they run out), admits, splits the token
budget, adds moves to and from host memory, and returns a plan. `commit(plan, output)` takes plans
in order and returns what each choice gained. Plan n+1 may be made before plan n is committed: its
rows then refer to tokens that plan n samples, and plan n+2 has the masks that follow from them.
What is in flight follows from the ledger and the tables, so no counter can disagree.

Always true: a running sequence has a slot and a table, a waiting one has neither. A prompt's blocks
are allocated at admission, a decode's when it crosses a block edge. A block is published when the
step that filled it is committed. The policy preempts a sequence at most MAX_PREEMPTIONS times: then
it is admitted with every block it can ever need, and is never a victim.

Yu et al. 2022 (Orca); chunked prefill: Agrawal et al. 2023 (Sarathi); recompute preemption: Kwon
et al. 2023 (vLLM).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from forge.blocks import BlockHash, BlockPool
from forge.commit_gate import CommitGate
from forge.config import EngineConfig
from forge.disk_cache import NO_DISK_TIER, DiskCache
from forge.draft_length import StepInfo
from forge.drafting import NO_DRAFTER, Drafter
from forge.errors import DuplicateRequest, InvalidConfig, PolicyError, describe_need
from forge.host_cache import NO_HOST_TIER, HostCache
from forge.kv_events import KVEventLog
from forge.max_len import check_fits, max_len
from forge.plan_rows import (
    collect_late_masks,
    propose_drafts,
    write_chunk,
    write_decodes,
    write_drafts,
)
from forge.policy import (
    FCFS,
    STEP_WORK,
    Candidate,
    Policy,
    PolicyContext,
    PolicyEvent,
    PolicyEventKind,
)
from forge.policy_calls import PolicyCalls
from forge.prefix_cache import PrefixCache
from forge.request import (
    INITIAL_WEIGHTS,
    NOTHING_CACHED,
    CachedTokens,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.sampling import mix
from forge.seam import COUPLED, BlockCopy, Event, LateMask, Row, RowOutput, StepOutput, StepPlan
from forge.sequence import (
    AppendResult,
    GrammarMatcher,
    Sequence,
    StopChecker,
    create_sequence,
    no_matcher,
    no_stop_checker,
)
from forge.sessions import Session, SessionKey, SessionTable
from forge.step_bound import PendingPrompt, max_prompt_tokens
from forge.uniform_steps import FastForward, create_last_plan, num_uniform_steps, repeat_decodes
from forge.wait_reasons import (
    BLOCKS,
    BUDGET,
    COMMIT,
    FILES,
    OWN_TOKEN,
    PAUSE,
    POLICY,
    PREEMPTION,
    PREFIX,
    SEARCH,
    SIBLING,
    SLOTS,
    WaitReasons,
)

MAX_PREEMPTIONS = 8

DISPLACED = "displaced for a waiting sequence"
"""Text of the event of a preemption that the policy chose while blocks were left."""


class Scheduler:
    """Turns requests into plans, and results of plans into deltas. One thread calls it.

    waiting                queued sequences in order of `queue_key`
    running                sequences with a slot and blocks, by id, in order of admission
    sequences              all live sequences, by id
    requests               open choices of each live request, by request id
    sessions               open sessions by key, oldest first
    ledger                 plans in flight, oldest first
    next_step              number of the next plan
    gate                   running sequences whose next row waits for a commit
    is_frozen              no row is planned: see `freeze`
    wait_reasons           why the last `schedule()` left sequences in the queue
    num_queried_tokens     tokens of sequences when they were first admitted
    cached_tokens          those of them that another sequence had computed, by tier
    num_uncached_tokens    those of them that no tier had
    resumed_tokens         those of `cached_tokens` in later turns of a session
    num_loaded_tokens      positions loaded from host memory
    num_planned_tokens     positions computed by all plans
    num_preemptions        times that a sequence lost its blocks and was queued again
    num_recomputed_tokens  positions computed again after a sequence lost its blocks
    num_draft_tokens       drafts verified
    num_accepted_tokens    drafts accepted
    new_request_ids        request of each choice that the last `schedule()` admitted a first time
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        end_ids: Iterable[int],
        policy: Policy = FCFS,
        create_stop_checker: Callable[[Request], StopChecker | None] = no_stop_checker,
        create_matcher: Callable[[SamplingParams], GrammarMatcher | None] = no_matcher,
        drafter: Drafter = NO_DRAFTER,
        kv_events: KVEventLog | None = None,
    ) -> None:
        self.config = config
        self.policy_calls = PolicyCalls(policy, self._build_context)
        self.pool = BlockPool(config.num_blocks, config.block_size, kv_events)
        self._kv_events = kv_events
        tier = config.host_tier or NO_HOST_TIER
        self.host_cache = HostCache(tier, self.pool, kv_events)
        self.disk_cache = DiskCache(tier.disk or NO_DISK_TIER, self.host_cache, kv_events)
        # Steps without a host pool spend no time on one.
        self._has_host_tier = config.host_tier is not None
        self.prefix_cache = PrefixCache(config, self.pool, self.host_cache, kv_events)
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.sequences: dict[int, Sequence] = {}
        self.requests: dict[int, list[Sequence]] = {}
        self._session_table = SessionTable(self.pool, config.max_sessions, self._on_session_close)
        self.sessions: Mapping[SessionKey, Session] = self._session_table.sessions
        self._is_stalled = False
        self.is_frozen = False
        self.gate = CommitGate()
        self.wait_reasons = WaitReasons()
        self.ledger: deque[StepPlan] = deque()
        self.cached_tokens = NOTHING_CACHED
        self.resumed_tokens = NOTHING_CACHED
        self.num_uncached_tokens = 0
        self.num_loaded_tokens = 0
        self.num_queried_tokens = 0
        self.num_planned_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.new_request_ids: list[int] = []
        self._vocab_size = vocab_size
        self._end_ids = tuple(dict.fromkeys(end_ids))
        self._create_stop_checker = create_stop_checker
        self._create_matcher = create_matcher
        self.drafter = drafter
        self._acceptance = config.speculation.acceptance if config.speculation else COUPLED
        self._prefilling: dict[int, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._next_seq_id = 0
        self.next_step = 0
        self._admitted_events: list[Event] = []
        self._preempted_events: list[Event] = []
        self._finished_events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """True while a request has not ended."""
        return bool(self.sequences)

    @property
    def can_plan(self) -> bool:
        """True while a request is live, unless the policy lets all wait for a paused session.

        It is False then until a request is added or aborted, or a session ends or expires. While
        frozen it is True only where a row in flight still needs its mask.
        """
        if self.is_frozen:
            return bool(self._late_masks())
        return bool(self.sequences) and not self._is_stalled

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of `cached_tokens` on the device."""
        return self.cached_tokens.device

    @property
    def work(self) -> int:
        """Clock of the device's work: tokens of all plans so far, and STEP_WORK for each plan."""
        return self.num_planned_tokens + STEP_WORK * self.next_step

    @property
    def policy(self) -> Policy:
        """The policy. Another one may be set between two plans, and begins at its initial state."""
        return self.policy_calls.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.policy_calls = PolicyCalls(policy, self._build_context)
        self._is_stalled = False

    @property
    def num_free_slots(self) -> int:
        """Slots held by no sequence."""
        return len(self._free_slots)

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Return whether a running sequence has yet to compute tokens that it was admitted with.

        False from the plan on that computes the last of them: decodes follow.
        """
        return sequence.id in self._prefilling

    def freeze(self) -> None:
        """Plan no row until `unfreeze`. Requests are added and aborted as before.

        A plan with masks alone may still follow: without it a row in flight has no result.
        """
        self.is_frozen = True

    def unfreeze(self) -> None:
        """Plan rows again."""
        self.is_frozen = False

    def skip_seq_ids(self, count: int) -> None:
        """Leave out the next `count` sequence ids, so that a test's ids differ from request ids."""
        self._next_seq_id += count

    # Requests.

    def add(self, request: Request) -> None:
        """Queue the request: one sequence for each of its choices.

        Raises ContextTooLong, NeverFits, DuplicateRequest or a matcher's error, and queues nothing.
        """
        if request.id in self.requests:
            raise DuplicateRequest("id", f"request {request.id} is live", "Use a new id")
        end = self.max_len(request)
        root = self.prefix_cache.root_hash(request)
        params = request.params
        seed = params.seed if params.seed is not None else mix(self.config.seed ^ mix(request.id))
        choices = []
        for choice in range(params.n):
            sequence = create_sequence(
                self._next_seq_id,
                request,
                choice,
                max_len=end,
                seed=seed,
                end_ids=self._end_ids,
                acceptance=self._acceptance,
                root=root,
                create_stop_checker=self._create_stop_checker,
                create_matcher=self._create_matcher,
            )
            self._next_seq_id += 1
            choices.append(sequence)
        if self.prefix_cache.is_enabled:
            self.prefix_cache.extend_hashes(
                choices[0], len(request.prompt) // self.config.block_size
            )
        session = self._session_table.begin_turn(request, choices[0].hashes[1:])
        self._is_stalled = False
        self.requests[request.id] = choices
        # Without a session only shareable blocks are known ahead, and are waited for by others.
        num_shareable = self.prefix_cache.num_shareable_blocks(choices[0])
        hashes = choices[0].hashes[: None if session else 1 + num_shareable]
        for sequence in choices:
            sequence.hashes = list(hashes)
            sequence.session = session
            self.sequences[sequence.id] = sequence
            self._enqueue(sequence)
            self._notify_policy(PolicyEventKind.ARRIVED, sequence, session)

    def max_len(self, request: Request) -> int:
        """Return the greatest length of a choice of the request, prompt included.

        Raises ContextTooLong or NeverFits. Any thread may call it.
        """
        return max_len(request, self.config, self.pool.num_blocks)

    def abort(self, request_id: int) -> list[Delta]:
        """End the open choices of a request, and return their deltas: [] for an unknown id."""
        choices = self.requests.get(request_id, ())
        self._is_stalled = False
        return [self._finish(sequence, FinishReason.ABORT) for sequence in list(choices)]

    # Sessions.

    def end_session(self, key: SessionKey) -> bool:
        """End a session for its client, and return whether it was open.

        It closes now or, with a live request, when that ends. Its blocks that no other session
        has are evicted before all others then.
        """
        self._is_stalled = False
        return self._session_table.end(key)

    def expire_session(self, key: SessionKey, last_turn: int) -> bool:
        """Close a session that is paused since its turn `last_turn`. Return whether it was.

        Any other has gone on since a timer was set for it, and does not change. The blocks of the
        closed one are no longer protected.
        """
        self._is_stalled = False
        return self._session_table.expire(key, last_turn)

    @property
    def num_paused_sessions(self) -> int:
        """Number of the open sessions that have no live request."""
        return self._session_table.num_paused

    def take_paused_sessions(self) -> list[Session]:
        """Return the open sessions that have paused since the last call, for timers."""
        return self._session_table.take_paused()

    @property
    def session_tips(self) -> Mapping[tuple[str, BlockHash], SessionKey]:
        """Session that a request continues which names none, by tenant and last block."""
        return self._session_table.tips

    @property
    def blocks_used_by_others(self) -> Collection[BlockHash]:
        """Blocks of sessions on which requests without a session have started."""
        return self._session_table.used_by_others

    # Planning.

    def schedule(self) -> StepPlan | None:
        """Return the next plan, or None when there is no work or a commit must come first.

        The plan is in flight from here on. Call it with one in flight at most: its rows refer only
        to tokens of the plan before, and with two in flight a row could lack a block.
        Raises PolicyError when a policy's answer is not valid, or when nothing is in flight and no
        sequence gets a token. Waiting for a paused session is valid: see `can_plan`.
        """
        if self.policy_calls.pending_error is not None:
            self.policy_calls.raise_pending()
        num_preempted = len(self._preempted_events)
        self.new_request_ids.clear()
        self.wait_reasons.clear()
        late_masks = self._late_masks()
        if self.is_frozen:
            self.wait_reasons.limit_admission(PAUSE, "the engine is paused")
            return self._add_plan([], [], [], late_masks) if late_masks else None
        rows: list[Row] = []
        late_rows: list[int] = []
        copies: list[BlockCopy] = []
        blocked: set[int] = set()
        if self.gate.sequences:
            blocked = self.gate.blocked()
            if blocked and self.gate.should_wait(blocked, self.running.values()):
                self.wait_reasons.limit_admission(COMMIT, "drafts in flight decide the next plan")
                return self._add_plan(rows, copies, late_rows, late_masks) if late_masks else None
        without_block = self._allocate_decode_blocks()
        try:
            if len(self._preempted_events) == num_preempted:
                # Where blocks ran out nothing is admitted: they are for running sequences.
                if self.waiting:
                    self._displace()
                    self._admit(copies)
            else:
                why = "running sequences are short of blocks"
                self.wait_reasons.limit_admission(PREEMPTION, why)
            self._plan_rows(rows, late_rows, without_block | blocked)
        except PolicyError:
            self.disk_cache.cancel_requests()
            # Copies of forks admitted just now are in no plan, so those sequences start again.
            for sequence in [s for s in self._prefilling.values() if not s.num_synced_blocks]:
                self._preempt(sequence, "the policy was refused")
            raise
        if not (rows or copies or late_masks or self._needs_plan_for_moves()):
            if self.sequences and not self.ledger:
                if not self.running and self._session_table.num_paused:
                    self._is_stalled = True
                    return None
                raise PolicyError(
                    f"{len(self.waiting)} requests wait, {len(self.running)} run, and the policy "
                    "gives none of them a token. Let admit or split choose one"
                )
            return None
        return self._add_plan(rows, copies, late_rows, late_masks)

    def _late_masks(self) -> tuple[LateMask, ...]:
        """Return the masks that the latest plan in flight needs from the next one."""
        return collect_late_masks(self.ledger[-1], self.sequences) if self.ledger else ()

    def _add_plan(
        self,
        rows: list[Row],
        copies: list[BlockCopy],
        late_rows: list[int],
        late_masks: tuple[LateMask, ...],
    ) -> StepPlan:
        """Add the next plan to the ledger, and return it."""
        plan = StepPlan(
            self.next_step,
            tuple(rows),
            self.pool.num_blocks,
            self.pool.block_size,
            tuple(copies),
            self.drafter.take_plans(),
            tuple(self._admitted_events),
            tuple(self._preempted_events),
            tuple(self._finished_events),
            late_rows=tuple(late_rows),
            late_masks=late_masks,
        )
        if self._has_host_tier:
            # Nothing is allocated in this plan any more, so a block that is stored stays as it is.
            plan = self._add_moves(plan)
        self.next_step += 1
        self._admitted_events.clear()
        self._preempted_events.clear()
        self._finished_events.clear()
        self.ledger.append(plan)
        return plan

    def _allocate_decode_blocks(self) -> set[int]:
        """Allocate a block for each running sequence whose next token needs one.

        Where too few are free, sequences are preempted. If a commit may free blocks none is: return
        the ids of those without a block instead. They get no row in this plan.
        """
        full = [i for i, t in self.pool.tables.items() if t.num_tokens == t.capacity]
        if not full:
            return set()
        growing = [self.running[i] for i in full]
        # With drafts in flight a sequence has no next token yet.
        growing = [s for s in growing if s.table.num_tokens < s.max_len - 1 and s.num_pending >= 0]
        if len(growing) > self.pool.num_free_blocks and not self._commit_frees_blocks():
            growing = self._preempt_until_fits(growing)
        count = self.pool.num_free_blocks
        self._make_room(len(growing))
        self.pool.grow_full_tables([sequence.id for sequence in growing[:count]])
        return {sequence.id for sequence in growing[count:]}

    def _commit_frees_blocks(self) -> bool:
        """Return whether a plan in flight samples a sequence's last token or verifies drafts."""
        return any(s.num_pending < 0 or s.is_ending for s in self.running.values())

    def _preempt_until_fits(self, growing: list[Sequence]) -> list[Sequence]:
        """Preempt until each of `growing` that still runs can get a block, and return those."""
        while len(growing) > self.pool.num_free_blocks:
            candidates = [s for s in self.running.values() if s.num_preemptions < MAX_PREEMPTIONS]
            victim = self.policy_calls.victim(candidates)
            victim.num_preemptions += 1
            why = f"{describe_need(len(growing))}, {self.pool.num_free_blocks} free"
            self._preempt(victim, why)
            growing = [s for s in growing if s is not victim]
        return growing

    def _displace(self) -> None:
        """Preempt one running sequence for a waiting one, if the policy chooses one."""
        if self.policy.displace is None:
            return
        candidates = [s for s in self.running.values() if s.num_preemptions < MAX_PREEMPTIONS]
        # Those that wait for a commit would not be admitted.
        ready = [s for s in self.waiting[: self.config.max_num_seqs] if not self._must_wait(s)]
        victim = self.policy_calls.displacement(candidates, ready)
        if victim is not None:
            victim.num_preemptions += 1
            self._preempt(victim, DISPLACED)

    def _make_room(self, num_blocks: int, admitted: Session | None = None) -> None:
        """Demote blocks of sessions, as the policy chooses, until `num_blocks` are not protected.

        admitted   session whose turn is about to start on its cached blocks
        """
        if not self.policy_calls.chooses_evictions:
            return
        pool, table = self.pool, self._session_table
        num_missing = min(num_blocks, pool.num_free_blocks) - pool.num_disposable_blocks
        if num_missing <= 0:
            return
        busy = {s.session.key for s in self.running.values() if s.session is not None}
        candidates = [
            session
            for key, session in self.sessions.items()
            if key not in busy and session is not admitted and table.num_own_blocks(session)
        ]
        # At least 1 % of the pool, so that the policy is not called for every block.
        num_missing = max(num_missing, pool.num_blocks // 100)
        while num_missing > 0 and candidates:
            session = self.policy_calls.eviction(candidates)
            num_demoted = min(num_missing, table.num_own_blocks(session))
            table.demote_tail(session, num_demoted)
            num_missing -= num_demoted
            if not table.num_own_blocks(session):
                candidates.remove(session)

    def _admit(self, copies: list[BlockCopy]) -> None:
        """Admit waiting sequences, as the policy chooses, while slots, blocks and budget allow.

        A sequence that must wait for a commit is passed over. Admission ends at the first one whose
        blocks are not free. The block copies of forks are appended to `copies`.
        """
        budget = self.config.max_num_batched_tokens - (len(self.running) - len(self._prefilling))
        budget -= sum(map(self._num_to_compute, self._prefilling.values()))
        skipped: list[Sequence] = []
        try:
            while self.waiting and self._may_admit(budget, len(skipped)):
                index = self.policy_calls.admission(self.waiting)
                if index is None:
                    self.wait_reasons.limit_admission(POLICY, "the policy admits none of them")
                    break
                sequence = self.waiting[index]
                if self._must_wait(sequence):
                    skipped.append(self.waiting.pop(index))
                elif self._try_start(sequence, copies):
                    del self.waiting[index]
                    budget -= self._num_to_compute(sequence)
                    for overtaken in self.waiting[:index]:
                        overtaken.num_overtaken += 1
                else:
                    break
        finally:  # whatever the policy raised, no sequence is lost from the queue
            for sequence in skipped:
                self._enqueue(sequence)

    def _may_admit(self, budget: int, num_skipped: int) -> bool:
        """Return whether another sequence may be admitted; otherwise set what ended admission."""
        num_slots = self.config.max_num_seqs
        if not self._free_slots:
            self.wait_reasons.limit_admission(SLOTS, f"{num_slots} of {num_slots} slots are taken")
        elif budget <= 0:
            num_tokens = self.config.max_num_batched_tokens
            why = f"the {num_tokens} tokens of a step are spent on running sequences"
            self.wait_reasons.limit_admission(BUDGET, why)
        elif num_skipped >= num_slots:  # or a long queue would slow every step
            why = f"{num_skipped} before them wait for a commit"
            self.wait_reasons.limit_admission(SEARCH, why)
        else:
            return True
        return False

    def _must_wait(self, sequence: Sequence) -> bool:
        """Return whether a commit that is to come decides what the sequence needs.

        True while its own token is in flight, while a sibling computes the same prompt, and while
        another sequence computes the next block of the same prefix. Also while files of its next
        blocks are read, which are requested here. The reason is written to `wait_reasons`.
        """
        reasons = self.wait_reasons.by_seq_id
        if sequence.epoch and any(
            row.seq_id == sequence.id and row.num_samples for p in self.ledger for row in p.rows
        ):
            reasons[sequence.id] = OWN_TOKEN
            return True
        if sequence.waits_for_sibling(self.requests[sequence.request.id]):
            reasons[sequence.id] = SIBLING
            return True
        if self.prefix_cache.next_block_in_progress(sequence):
            reasons[sequence.id] = PREFIX
            return True
        if not self._has_host_tier or self.disk_cache.is_empty or sequence.was_retried:
            return False
        first, hashes = self.prefix_cache.missing_blocks(sequence)
        is_idle = not self.running
        if self.disk_cache.request_fetches(sequence.id, first, hashes, is_idle=is_idle):
            reasons[sequence.id] = FILES
            return True
        return False

    def _try_start(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """Let the sequence run with a slot and blocks, or return False where too few are free.

        The table starts on cached blocks or is forked from a sibling that has computed the prompt:
        the block that a fork must copy is appended to `copies`. The caller changes `waiting`.
        """
        pool = self.pool
        parent = sequence.fork_source(self.requests[sequence.request.id])
        shared = self.prefix_cache.cached_blocks(sequence)
        if sequence.session is not None and not sequence.epoch:
            self._session_table.cut_branch(sequence.session, sequence.hashes[1:])
        if shared and not sequence.epoch:
            self._session_table.note_shared(sequence.session, sequence.hashes[1 : 1 + len(shared)])
        num_positions = self._num_positions(sequence, len(sequence.tokens))
        fork_len = sequence.bind.prompt_len - 1  # a fork computes only the last prompt position
        if parent is None:
            num_needed = pool.num_blocks_to_open(num_positions, shared)
        else:
            num_needed = pool.num_blocks_to_open(num_positions) - fork_len // self.config.block_size
        # Left free, so that running sequences can grow: one block each, up to 1 % of the pool.
        num_reserved = min(len(self.running), max(1, pool.num_blocks // 100))
        if num_needed + num_reserved > pool.num_free_blocks:
            why = f"{describe_need(num_needed)}, {num_reserved} kept, {pool.num_free_blocks} free"
            self.wait_reasons.by_seq_id[sequence.id] = why
            self.wait_reasons.limit_admission(BLOCKS, f"sequence {sequence.id} lacks blocks")
            return False
        num_new = num_needed
        if parent is None:  # cached blocks that it starts on are not left for new ones
            num_new = pool.num_blocks_for(num_positions) - len(shared)
            num_new += pool.count_disposable(shared)
        self._make_room(num_new, sequence.session)
        if parent is None:
            why = "resumed" if sequence.epoch else "new"
            sequence.table = pool.open(sequence.id, num_positions, shared)
        else:
            why = f"forked from {parent.id}"
            sequence.table = pool.fork(parent.id, sequence.id, fork_len)
            copy = pool.grow(sequence.id, num_positions - fork_len).copy
            if copy is not None:
                copies.append(BlockCopy(*copy))
        sequence.num_committed = sequence.num_shared_tokens = sequence.table.num_tokens
        num_shared = sequence.num_committed
        cached = CachedTokens(num_shared) if num_shared else NOTHING_CACHED
        if self._has_host_tier:
            num_loads = self._begin_load(sequence, len(shared)) if parent is None else 0
            if num_loads:
                why += f", {num_loads} blocks to load"
                cached = self._count_loads(sequence, len(shared), num_loads)
            self.disk_cache.forget_sequence(sequence.id)
        if not sequence.epoch:  # a preempted sequence would count its own blocks
            self.num_queried_tokens += len(sequence.tokens)
            self.num_uncached_tokens += len(sequence.tokens)
            if cached is not NOTHING_CACHED:
                self._count_cached(sequence, cached)
            # What a later choice computes again was written before.
            if not sequence.runs_first(self.requests[sequence.request.id]):
                sequence.num_counted_blocks = sequence.bind.prompt_len // self.config.block_size
            self.new_request_ids.append(sequence.request.id)
        self.prefix_cache.add_in_progress(sequence)
        sequence.slot = self._free_slots.pop()
        self.running[sequence.id] = self._prefilling[sequence.id] = sequence
        self.drafter.add_sequence(sequence, self._step_info())
        self.gate.update(sequence)
        self._admitted_events.append(
            Event(sequence.id, f"{why}, {sequence.num_committed} tokens shared")
        )
        self._notify_policy(PolicyEventKind.ADMITTED, sequence, sequence.session)
        return True

    def _count_cached(self, sequence: Sequence, cached: CachedTokens) -> None:
        """Count tokens that a sequence does not compute when it first runs."""
        self.cached_tokens = self.cached_tokens.plus(cached)
        self.num_uncached_tokens -= cached.total
        if sequence.runs_first(self.requests[sequence.request.id]):
            sequence.num_counted_blocks = cached.total // self.config.block_size
            # With prompt logprobs the first choice computes all of the prompt, before or after.
            if sequence.request.params.prompt_logprobs is None:
                sequence.cached_tokens = cached
        if sequence.session is not None and sequence.session.num_turns > 1:
            self.resumed_tokens = self.resumed_tokens.plus(cached)

    def _begin_load(self, sequence: Sequence, num_cached: int) -> int:
        """Load the host blocks that follow the sequence's cached blocks, and return their number.

        0 where it is not worthwhile, and after a failed step: a load may have been why.
        """
        host_cache = self.host_cache
        host_cache.touch(sequence.hashes[1 : 1 + num_cached])
        if sequence.was_retried:
            return 0
        host_blocks = self.prefix_cache.host_blocks(sequence, num_cached)
        if not host_blocks or not host_cache.is_load_worthwhile(
            num_cached, len(host_blocks), is_idle=not self.running
        ):
            return 0
        host_cache.begin_load(sequence.id, host_blocks)
        return len(host_blocks)

    def _count_loads(self, sequence: Sequence, num_cached: int, num_loads: int) -> CachedTokens:
        """Return the tokens of cached blocks, and those of the loads that follow them."""
        size = self.config.block_size
        hashes = sequence.hashes[1 + num_cached : 1 + num_cached + num_loads]
        num_fetched = self.disk_cache.num_fetched_for(sequence.id, hashes)
        return CachedTokens(size * num_cached, size * (num_loads - num_fetched), size * num_fetched)

    def _build_context(self, state: Hashable) -> PolicyContext:
        pool = self.pool
        return PolicyContext(
            self.work,
            pool.num_blocks,
            pool.block_size,
            pool.num_free_blocks,
            self.config.max_num_seqs,
            self.running.values(),
            self.sessions,
            state,
            self._num_cached_tokens,
            self._session_table.num_own_blocks,
            self._session_table.num_blocks,
        )

    def _notify_policy(
        self, kind: PolicyEventKind, sequence: Sequence | None, session: Session | None
    ) -> None:
        if self.policy.update is not None:
            self.policy_calls.notify(PolicyEvent(kind, self.work, sequence, session))

    def _num_cached_tokens(self, candidate: Candidate) -> int:
        sequence = self.sequences[candidate.id]
        return len(self.prefix_cache.cached_blocks(sequence)) * self.pool.block_size

    def _step_info(self) -> StepInfo:
        return StepInfo(len(self.running), self.next_step)

    def _num_positions(self, sequence: Sequence, end: int) -> int:
        """Return how many positions its table must cover: `end`, or all after MAX_PREEMPTIONS."""
        if sequence.num_preemptions < MAX_PREEMPTIONS:
            return end
        # With every block that it can ever need it is never a victim again.
        return max(end, sequence.max_len - 1)

    def _plan_rows(self, rows: list[Row], late_rows: list[int], blocked: set[int]) -> None:
        """Append the next plan's rows: drafts, other decodes, then chunks, as the policy splits.

        late_rows   receives the indices of rows whose masks the plan after that gives
        blocked     ids of sequences without a row: they have no block, or wait for a commit
        """
        if not (self._prefilling or blocked or self.gate.sequences):
            self.num_planned_tokens += write_decodes(
                rows, late_rows, self.running.values(), self.next_step
            )
            return
        prefilling = list(self._prefilling.values())
        if self._has_host_tier:
            # A row reads all blocks before it, so it follows in the plan after the last load.
            to_plan = self.host_cache.num_blocks_to_plan
            prefilling = [s for s in prefilling if not to_plan(s.id)]
        budget = self.config.max_num_batched_tokens
        decodes = [
            s
            for s in self.running.values()
            if s.id not in self._prefilling
            and s.id not in blocked
            and s.table.num_tokens + 1 < s.max_len
        ]
        if not prefilling:
            self._plan_decodes(rows, late_rows, decodes, budget - len(decodes))
            return
        budget = self._bounded_budget(decodes, prefilling)
        split = self.policy_calls.split(budget, len(decodes), prefilling)
        num_spent = split.num_decodes + sum(split.chunks)
        self._plan_decodes(rows, late_rows, decodes[: split.num_decodes], budget - num_spent)
        for sequence, chunk in zip(prefilling, split.chunks, strict=True):
            if chunk:
                if sequence.epoch:
                    self._count_recomputed(sequence, chunk)
                write_chunk(rows, sequence, chunk)
                self.num_planned_tokens += chunk
                self.drafter.prefill(sequence, sequence.table.num_tokens)
                if not sequence.num_pending:
                    del self._prefilling[sequence.id]

    def _count_recomputed(self, sequence: Sequence, chunk: int) -> None:
        """Count the positions of the next chunk that the sequence lost with its blocks."""
        num_left = sequence.num_lost_positions - sequence.table.num_tokens
        num_again = max(0, min(chunk, num_left))
        sequence.num_recomputed += num_again
        self.num_recomputed_tokens += num_again

    def _bounded_budget(self, decodes: list[Sequence], prefilling: list[Sequence]) -> int:
        """Return the most tokens of a plan that takes at most `max_step_ms`, if that is set.

        A plan that delays no decode is not bounded. Prompts are taken in running order; a policy
        may give the tokens to others, whose attention takes another time.
        """
        costs, max_step_ms = self.config.mixed_costs, self.config.max_step_ms
        budget = self.config.max_num_batched_tokens
        if costs is None or max_step_ms is None or len(self._prefilling) == len(self.running):
            return budget
        prompts: list[PendingPrompt] = []
        num_left = budget - len(decodes)
        for sequence in prefilling:
            num_tokens = min(num_left, sequence.num_pending)
            prompts.append(PendingPrompt(sequence.table.num_tokens, num_tokens))
            num_left -= num_tokens
        num_positions = sum(s.table.num_tokens for s in decodes)
        return len(decodes) + max_prompt_tokens(
            costs, int(1000 * max_step_ms), prompts, len(decodes), num_positions
        )

    def _plan_decodes(
        self, rows: list[Row], late_rows: list[int], sequences: list[Sequence], draft_budget: int
    ) -> None:
        """Append a row for each sequence: first the rows with drafts, then those of one token.

        draft_budget   most drafts in all rows together
        """
        without_drafts = sequences
        if self.gate.sequences:
            without_drafts = []
            for sequence in sequences:
                drafts, masks = propose_drafts(self.drafter, self.pool, sequence, draft_budget)
                if drafts:
                    draft_budget -= len(drafts)
                    self.num_planned_tokens += 1 + len(drafts)
                    write_drafts(rows, sequence, drafts, masks)
                else:
                    without_drafts.append(sequence)
        self.num_planned_tokens += write_decodes(rows, late_rows, without_drafts, self.next_step)

    def _num_to_compute(self, sequence: Sequence) -> int:
        """Return how many known tokens rows have yet to compute, without those to be loaded."""
        num_tokens = sequence.num_pending
        if self._has_host_tier:
            num_blocks = self.host_cache.num_blocks_to_plan(sequence.id)
            num_tokens -= num_blocks * self.config.block_size
        return num_tokens

    def _needs_plan_for_moves(self) -> bool:
        """Return whether a plan without rows has loads, begins fetches or awaits their answers."""
        disk_cache = self.disk_cache
        is_fetching = disk_cache.needs_plan or (disk_cache.is_fetching and not self.ledger)
        return is_fetching or bool(self._sequences_to_load())

    def _sequences_to_load(self) -> list[Sequence]:
        to_plan = self.host_cache.num_blocks_to_plan
        return [s for s in self._prefilling.values() if to_plan(s.id)]

    def _add_moves(self, plan: StepPlan) -> StepPlan:
        """Return the plan with its moves. Loads are bounded unless every running sequence loads."""
        host_cache, loading = self.host_cache, self._sequences_to_load()
        loads = host_cache.plan_loads(loading, is_bounded=len(loading) < len(self.running))
        spills, fetches = self.disk_cache.plan_moves(plan.step)
        return plan._replace(
            num_host_blocks=host_cache.num_blocks,
            stores=tuple(host_cache.plan_stores(plan.step)),
            loads=tuple(loads),
            spills=spills,
            fetches=fetches,
            file_epoch=self.disk_cache.epoch,
        )

    # Results.

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Return what each choice gained from `plan`, the oldest in flight, or [] if it was voided.

        A row whose sequence has ended since is dropped: it was computed past a stop, or the request
        was aborted. A preempted sequence keeps its token in flight, since it lost only its blocks.
        The loop itself commits a token that cannot end its sequence (see `Sequence.inspect_from`).
        `_commit_row` commits every other row.
        """
        if not self.ledger or self.ledger[0] is not plan:
            assert plan not in self.ledger, f"plan {plan.step} committed out of order"
            return []  # voided, or committed twice
        self.ledger.popleft()
        assert output.step == plan.step, f"plan {plan.step} got the output of {output.step}"
        assert len(output.rows) == len(plan.rows), f"{len(output.rows)} of {len(plan.rows)} rows"
        if self._has_host_tier:
            self._commit_moves(plan)
            self.disk_cache.commit_answers(output.answers)
            self.disk_cache.drop_overdue(self.next_step)
        for seq_id in output.undrafted:  # before any row: committing a row publishes blocks
            self.drafter.discard(seq_id)
        deltas: list[Delta] = []
        append, new = deltas.append, tuple.__new__
        sequences = self.sequences
        block_size = self.config.block_size
        vocab_size = self._vocab_size
        rest = ((), None, NOTHING_CACHED, INITIAL_WEIGHTS, None)
        for row, result in zip(plan.rows, output.rows, strict=True):
            sequence = sequences.get(row.seq_id)
            if sequence is None:
                continue
            # One unpacking takes a third of the time of three attribute reads.
            tokens, logprobs, _prompt_logprobs, error, _verified = result
            known = sequence.tokens
            end = len(known)
            if (
                end >= sequence.inspect_from
                or len(tokens) != 1
                or error is not None
                or tokens[0] in sequence.stop_ids
                or not 0 <= tokens[0] < vocab_size
            ):
                self._commit_row(sequence, row, result, deltas)
                continue
            sequence.num_committed = end
            if not end % block_size:
                self.prefix_cache.publish(sequence, end - 1, end)
            known.append(tokens[0])
            # A Delta is built as a tuple: a third of the time of calling the class.
            request_id, choice = sequence.request.id, sequence.choice
            append(new(Delta, (request_id, choice, tokens, None, None, logprobs, *rest)))
        if output.undrafted:
            self._handle_draft_failures(output.undrafted)
        return deltas

    def _commit_moves(self, plan: StepPlan) -> None:
        """Publish the blocks that the plan has stored and loaded.

        A load whose sequence has ended or lost its blocks since is dropped.
        """
        self.host_cache.commit_stores(plan)
        size = self.config.block_size
        for load in plan.loads:
            sequence = self.sequences.get(load.seq_id)
            if sequence is not None and sequence.epoch == load.epoch:
                start = sequence.num_committed
                sequence.num_committed = start + size
                self.prefix_cache.publish(sequence, start, start + size)
                self.host_cache.commit_load(load)
                self.num_loaded_tokens += size

    def _commit_row(
        self, sequence: Sequence, row: Row, result: RowOutput, deltas: list[Delta]
    ) -> None:
        """Commit a row whose result is inspected, publish its blocks, and append its delta, if any.

        It is of a prompt chunk, has drafts, has failed, or its token is inspected (`inspect_from`).
        """
        tokens, error = result.tokens, result.error
        if row.drafts and error is None and 0 < len(tokens) <= row.num_samples:
            deltas.append(self._commit_verification(sequence, row, result))
            return
        if error is not None or len(tokens) != row.num_samples:
            why = error or f"the model gave {len(tokens)} tokens, {row.num_samples} were planned"
            deltas.append(self._finish(sequence, FinishReason.ERROR, why))
            return
        # A sampled token's position is the first after the row.
        end = len(sequence.tokens) if tokens else row.end
        if row.epoch == sequence.epoch:
            start, sequence.num_committed = sequence.num_committed, end
            are_new = self.prefix_cache.publish(sequence, start, end)
            if are_new and end <= sequence.bind.prompt_len:
                size = self.config.block_size
                sequence.count_written(start // size, are_new, size)
        if tokens:
            deltas.append(self._commit_token(sequence, row, result))
        else:
            self._commit_prompt(sequence, row, result.prompt_logprobs, deltas)

    def _commit_prompt(
        self, sequence: Sequence, row: Row, logprobs: tuple[TokenLogprob, ...], deltas: list[Delta]
    ) -> None:
        """Append the delta of a row without a sample: its prompt logprobs, if they were requested.

        With max_tokens = 0 the sequence ends with its last such row.
        """
        logprobs = sequence.take_prompt_logprobs(row.start, logprobs)
        if row.end >= sequence.max_len:
            deltas.append(
                self._finish(sequence, FinishReason.LENGTH)._replace(prompt_logprobs=logprobs)
            )
        elif logprobs:
            deltas.append(Delta(sequence.request.id, sequence.choice, prompt_logprobs=logprobs))

    def _commit_token(self, sequence: Sequence, row: Row, result: RowOutput) -> Delta:
        """Append the token of a row without drafts, and return the delta. It may end the sequence.

        Where a review is due the Drafter sets `num_drafts`. The CommitGate sets `inspect_from`.
        """
        appended = sequence.append_tokens(result.tokens, self._vocab_size)
        review_len = self.drafter.review_len(sequence)
        if appended.finish is None and sequence.slot is not None:
            if len(sequence.tokens) >= review_len:
                self.drafter.set_num_drafts(sequence, self._step_info())
                self.gate.update(sequence)
                review_len = self.drafter.review_len(sequence)
        if row.epoch == sequence.epoch:
            self.gate.skip_inspection(sequence, review_len)
        return self._build_delta(sequence, row, result, appended)

    def _commit_verification(self, sequence: Sequence, row: Row, result: RowOutput) -> Delta:
        """Append accepted drafts and the next token, and return the delta.

        Free the blocks of rejected drafts. The Drafter counts acceptance and sets `num_drafts`.
        """
        drafter, start, step_info = self.drafter, row.start, self._step_info()
        appended = sequence.append_tokens(result.tokens, self._vocab_size)
        num_verified, num_accepted = len(result.verified), len(result.tokens) - 1
        self.num_draft_tokens += num_verified
        self.num_accepted_tokens += num_accepted
        if row.epoch == sequence.epoch:
            end = start + appended.num_taken
            num_blocks = self.pool.num_blocks_for(self._num_positions(sequence, end))
            self.pool.shrink(sequence.id, end, num_blocks)
            sequence.num_synced_blocks = min(sequence.num_synced_blocks, num_blocks)
            sequence.num_committed = end
            self.prefix_cache.publish(sequence, start, end)
            drafter.update_acceptance(sequence, num_verified, num_accepted, step_info)
            if appended.finish is None:
                drafter.set_num_drafts(sequence, step_info)
                self.gate.update(sequence)
        return self._build_delta(sequence, row, result, appended)

    def _build_delta(
        self, sequence: Sequence, row: Row, result: RowOutput, appended: AppendResult
    ) -> Delta:
        """Return the delta of a committed row, and finish the sequence where it has ended."""
        if appended.finish is FinishReason.ERROR:
            return self._finish(sequence, appended.finish, appended.error)
        delta = sequence.create_delta(row.start, result, appended)
        if appended.finish is not None:
            self._finish(sequence, appended.finish)
        return delta

    def _handle_draft_failures(self, seq_ids: Iterable[int]) -> None:
        """Pause drafting for those of these sequences that still run: their draft model failed.

        `commit` has discarded their blocks in the draft model, before it committed the rows.
        """
        for seq_id in seq_ids:
            sequence = self.running.get(seq_id)
            if sequence is not None:
                self.drafter.handle_failure(sequence, self._step_info())
                self.gate.update(sequence)

    # Fast-forward, for simulation only.

    def num_uniform_steps(self, token: int) -> int:
        """Return for how many steps each running sequence gains one `token` and nothing else.

        Nothing is admitted, preempted, prefilled, drafted or masked in them. 0 where the next plan
        decides something, and unless depth - 1 plans are in flight. Changes nothing.
        """
        if self._prefilling or self.gate.sequences or not self.running:
            return 0
        if self.waiting and (self._free_slots or self.policy.displace is not None):
            return 0
        # A plan in flight still has a row of each sequence that has ended since.
        events = self._admitted_events or self._preempted_events
        if events or (self._finished_events and self.ledger):
            return 0
        if self.pool.num_dirty_cached_blocks or self.disk_cache.has_moves:
            return 0  # a plan may store or spill some
        if len(self.ledger) != self.config.depth - 1:
            return 0
        # Which block goes next is a decision where the policy evicts.
        evicts = self.policy_calls.chooses_evictions
        num_blocks = self.pool.num_disposable_blocks if evicts else self.pool.num_free_blocks
        return num_uniform_steps(
            list(self.running.values()), token, self.ledger, self.pool, num_blocks
        )

    def fast_forward(self, steps: int, token: int) -> FastForward:
        """Make `steps` - 1 plans after the one just scheduled, and commit the oldest `steps` plans.

        Each row gains one `token`. At most `num_uniform_steps` steps, returned before `schedule()`.
        As many plans are in flight afterwards as were before `schedule()`.
        """
        sequences, num_in_flight = list(self.running.values()), len(self.ledger) - 1
        last = self.ledger[-1]
        allocations = repeat_decodes(sequences, steps, token, self.pool, self.prefix_cache)
        self.next_step += steps - 1
        self.num_planned_tokens += (steps - 1) * len(sequences)
        self.ledger.clear()
        if num_in_flight and steps > 1:
            last = create_last_plan(last, sequences, allocations, steps)
        if num_in_flight:
            self.ledger.append(last)
        ended = [s for s in sequences if len(s.tokens) == s.max_len]
        return FastForward(allocations, [self._finish(s, FinishReason.LENGTH) for s in ended])

    # Preemption, end and reset.

    def void(self, why: str) -> list[Delta]:
        """Drop every plan in flight and preempt what runs; return the deltas of sequences that end.

        Call it when a step has failed as a whole. A sequence is retried once: it waits and is
        computed again, without loads. At the second void it ends with an error, so a model that
        always fails ends every request. The host blocks that these plans load are forgotten.
        """
        loaded = [load.host_block for plan in self.ledger for load in plan.loads]
        self.ledger.clear()
        self.host_cache.void_stores()
        self.disk_cache.drop()
        deltas = []
        for sequence in list(self.sequences.values()):
            if sequence.slot is None:
                continue
            if sequence.was_retried:
                deltas.append(self._finish(sequence, FinishReason.ERROR, why))
            else:
                sequence.was_retried = True
                self._preempt(sequence, why)
        self.host_cache.void_loads(loaded)
        return deltas

    def resize(self, num_blocks: int) -> None:
        """Resize the pool from the next plan on; preempt the sequences that hold a removed block.

        Raises NeverFits, and changes nothing, when a live request could then not finish alone.
        """
        for sequence in self.sequences.values():
            check_fits(sequence, self.pool.block_size, num_blocks)
        for sequence in list(self.running.values()):
            if max(sequence.table.blocks) >= num_blocks:
                self._preempt(sequence, f"pool resized to {num_blocks} blocks")
        self.pool.resize(num_blocks)
        self._is_stalled = False

    def resize_host(self, num_host_blocks: int) -> None:
        """Resize the host pool from the next plan on.

        Sequences that have yet to load a removed block are preempted. Raises InvalidConfig for an
        engine that was made without a host pool.
        """
        if not self._has_host_tier:
            raise InvalidConfig(
                "host_tier", "this engine has no host pool to resize", "Set EngineConfig.host_tier"
            )
        for seq_id in self.host_cache.seq_ids_beyond(num_host_blocks):
            why = f"host pool resized to {num_host_blocks} blocks"
            self._preempt(self.running[seq_id], why)
        self.disk_cache.drop()
        self.host_cache.resize(num_host_blocks)

    def reset_prefix_cache(self) -> None:
        """Unpublish every block, so that later requests do not share it.

        Those of the draft model and of the host pool too, and no file of before is read. A block
        that a running sequence has yet to compute is published when it is full. Sequences that are
        loading are preempted: what they load was computed before.
        """
        self._is_stalled = False
        for seq_id in self.host_cache.loading_seq_ids:
            self._preempt(self.running[seq_id], "the prefix cache was reset")
        self.disk_cache.reset()
        self.host_cache.reset()
        self.pool.reset_cache()
        self.drafter.reset_prefix_cache()
        if self._kv_events is not None:
            self._kv_events.record_cleared()

    def discard_kv(self, why: str, namespace: str) -> None:
        """Preempt all that runs, and share no block computed so far with a later one, in any tier.

        Call it between two plans, with none in flight. Sequences keep their tokens, and all their
        positions are computed again.

        namespace   replaces `EngineConfig.cache_namespace` in the keys of all later blocks
        """
        assert not self.ledger, f"{len(self.ledger)} plans in flight write blocks of before"
        for sequence in list(self.running.values()):
            self._preempt(sequence, why)
        self.prefix_cache.namespace = namespace
        for sequence in self.sequences.values():
            self.prefix_cache.rehash(sequence)
        self._session_table.forget_chains()
        self.reset_prefix_cache()

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.queue_key)

    def _preempt(self, sequence: Sequence, why: str) -> None:
        """Free slot and blocks and queue the sequence. It keeps its tokens.

        `Sequence.num_preemptions` is left to the caller: only the policy's choices count there.
        """
        if self._has_host_tier:
            self.host_cache.expect_reuse(self._committed_chain(sequence))
        self._stop_running(sequence)
        self.num_preemptions += 1
        self._preempted_events.append(Event(sequence.id, why))
        self._enqueue(sequence)
        self._notify_policy(PolicyEventKind.PREEMPTED, sequence, sequence.session)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
        """Remove the sequence from all queues and tables, and return a delta of its end alone."""
        request, session = sequence.request, sequence.session
        num_tokens = sequence.num_committed
        chain = self._committed_chain(sequence)
        if self._has_host_tier:
            self.disk_cache.forget_sequence(sequence.id)
            if session is not None:
                self.host_cache.expect_reuse(chain)
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)
        del self.sequences[sequence.id]
        choices = self.requests[request.id]
        choices.remove(sequence)
        self._finished_events.append(Event(sequence.id, error or reason.value))
        self._session_table.end_choice(request, session, chain, num_tokens)
        self._notify_policy(PolicyEventKind.FINISHED, sequence, session)
        if session is not None:
            session.num_served_tokens += sequence.num_served
        if not choices:
            del self.requests[request.id]
            if session is not None:
                self._session_table.end_turn(session, self.work)
        return Delta(
            request.id,
            sequence.choice,
            finish=reason,
            error=error,
            cached_tokens=sequence.cached_tokens,
        )

    def _committed_chain(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of the sequence's committed full blocks, first block first."""
        return sequence.hashes[1 : 1 + sequence.num_committed // self.config.block_size]

    def _on_session_close(self, session: Session) -> None:
        self._notify_policy(PolicyEventKind.SESSION_CLOSED, None, session)

    def _stop_running(self, sequence: Sequence) -> None:
        """Free slot, blocks, drafts and blocks in progress, and begin the sequence's next epoch.

        The only way out of `running`. It leaves the sequence in no queue.
        """
        del self.running[sequence.id]
        self._prefilling.pop(sequence.id, None)
        self.gate.remove(sequence)
        self.drafter.remove_sequence(sequence)
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        self._free_slots.append(sequence.slot)
        num_lost = max(sequence.num_lost_positions, sequence.table.num_tokens)
        sequence.num_lost_positions = num_lost
        sequence.num_served_before = sequence.num_served
        sequence.num_shared_tokens = 0
        if self._has_host_tier:
            self.host_cache.cancel_load(sequence.id)
        self.pool.release(sequence.id)
        self.prefix_cache.remove_in_progress(sequence)
        sequence.slot = None
        sequence.num_committed = sequence.num_synced_blocks = 0
        sequence.epoch += 1
