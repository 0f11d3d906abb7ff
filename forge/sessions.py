"""Sessions: which requests are turns of one growing context, and which blocks that context has.

Owns the open sessions and the hashes of their blocks. Knows no queue, plan or clock: the Scheduler
says when a turn begins and ends, and a caller's timer says when a paused session expires.

    turn 0   [ system | task ] + answer 0                       the session opens
                                          ... a tool runs ...   paused: no request of it is live
    turn 1   [ system | task | answer 0 | result ] + answer 1
    end      by the client: its blocks are demoted
    expiry   by a timer: the session closes, and its blocks are as others

    chain    hashes of the full blocks of the last ended turn, first block first. They are protected
             while they are in the chain of an open session

A request that names no session continues one all the same where its prompt begins with the whole
chain of a request that has ended. So clients that send no session field are recognised by their
second request.

Always true: a session holds no block. Protected blocks are free, and are evicted where no other is
left; the policy may say in which order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from forge.blocks import BlockHash, BlockPool
from forge.request import Request

SessionKey: TypeAlias = tuple[str, str | int]
"""Tenant, and the session id that the client sent or the id of a recognised session's request."""

MAX_TIPS = 4096
"""Ended requests without a session, the latest ones, that a later request can continue."""

PAUSE_MARGIN_S = 5.0
"""Seconds of grace beyond twice the expected pause."""

MAX_CHAIN_RATIO = 4
"""Most hashes in all chains together, as a multiple of the pool's blocks."""


@dataclass(slots=True, eq=False)
class Session:
    """Requests that share a growing context. Owned by the SessionTable; a policy reads it.

    key                 tenant and name
    num_turns           requests so far, live ones included
    last_turn           number of its latest request, counted over the requests of all sessions
    num_live            requests that have not ended
    num_tokens          computed tokens of its longest ended turn, prompt and output
    num_served_tokens   positions computed for ended turns, recomputed ones included
    chain               hashes of the full blocks of the last ended turn. A block may have been
                        evicted since
    num_foreign_blocks  first blocks of the chain that were cached before the session began
    paused_at           work of the scheduler when the last live request ended; 0: none has ended
    expected_pause_s    seconds until the next turn, as the client expects; None: not known
    has_ended           the client has ended it: it closes when no request of it is live
    """

    key: SessionKey
    num_turns: int = 0
    last_turn: int = 0
    num_live: int = 0
    num_tokens: int = 0
    num_served_tokens: int = 0
    chain: list[BlockHash] = field(default_factory=list)
    num_foreign_blocks: int = 0
    paused_at: int = 0
    expected_pause_s: float | None = None
    has_ended: bool = False

    @property
    def is_paused(self) -> bool:
        """True while no request of the session is live."""
        return self.num_live == 0

    def is_paused_since(self, turn: int) -> bool:
        """Return whether the session is paused, and has been since its request of that number."""
        return self.is_paused and self.last_turn == turn

    def time_to_live_s(self, max_s: float) -> float:
        """Return after how many seconds of a pause the session expires, at most `max_s`.

        Twice the expected pause and some seconds more, where a pause is expected.
        """
        if self.expected_pause_s is None:
            return max_s
        return min(max_s, 2 * self.expected_pause_s + PAUSE_MARGIN_S)


def num_common_blocks(first: Sequence[BlockHash], second: Sequence[BlockHash]) -> int:
    """Return how many blocks two chains share. Each hash includes all before, so it is a search."""
    shorter = range(min(len(first), len(second)))
    return bisect_left(shorter, True, key=lambda index: first[index] != second[index])


class SessionTable:
    """The open sessions, and what their turns and ends do to the cached blocks.

    sessions         open sessions by key, oldest first
    num_paused       those of them without a live request
    max_sessions     most open sessions of one tenant
    on_close         called with each session that has just left `sessions`
    tips             by tenant and last block of an ended request: the key of the session that a
                     later one opens or continues. The latest MAX_TIPS, oldest first
    used_by_others   blocks of chains on which requests without a session have started
    """

    def __init__(
        self, pool: BlockPool, max_sessions: int, on_close: Callable[[Session], None]
    ) -> None:
        self.sessions: dict[SessionKey, Session] = {}
        self.num_paused = 0
        self._pool = pool
        self._max_sessions = max_sessions
        self._on_close = on_close
        self._by_tenant: defaultdict[str, dict[SessionKey, Session]] = defaultdict(dict)
        self._num_chains: dict[BlockHash, int] = {}  # by hash: sessions whose chain has it
        self.tips: OrderedDict[tuple[str, BlockHash], SessionKey] = OrderedDict()  # oldest first
        self.used_by_others: set[BlockHash] = set()
        self._num_hashes = 0
        self._num_requests = 0
        self._paused: dict[SessionKey, Session] = {}

    def take_paused(self) -> list[Session]:
        """Return the open sessions that have paused since the last call."""
        paused = [session for session in self._paused.values() if session.is_paused]
        self._paused.clear()
        return paused

    def begin_turn(self, request: Request, hashes: Sequence[BlockHash]) -> Session | None:
        """Count a new request, and return its session, or None where it belongs to none.

        hashes   of the full blocks of its prompt

        A session opens where none has the name. None: the tenant has `max_sessions` sessions, all
        with live requests; or the request names none and continues none.
        """
        if not self._max_sessions:
            return None
        if request.session_id:
            session = self._open((request.tenant, request.session_id))
        else:
            session = self._recognise(request, hashes)
        if session is not None:
            self.num_paused -= session.is_paused
            self._num_requests += 1
            session.num_turns += 1
            session.last_turn = self._num_requests
            session.num_live += 1
            session.expected_pause_s = request.expected_pause_s
            session.has_ended = request.session_end
        return session

    def cut_branch(self, session: Session, hashes: Sequence[BlockHash]) -> None:
        """Demote the blocks of the chain that the session's only live turn does not begin with.

        hashes   of the full blocks of that turn
        """
        num_common = num_common_blocks(session.chain, hashes)
        if session.num_live == 1 and num_common < len(session.chain):
            self._cut(session, num_common, demote=True)
            session.num_tokens = num_common * self._pool.block_size

    def note_shared(self, session: Session | None, hashes: Sequence[BlockHash]) -> None:
        """Note that a request starts on these cached blocks, one or more.

        session   of the request. The end of a session demotes no block that others have used
        """
        if session is None:
            if hashes[-1] in self._num_chains:
                self.used_by_others.add(hashes[-1])
        elif not session.chain:
            session.num_foreign_blocks = len(hashes)

    def end_choice(
        self, request: Request, session: Session | None, hashes: list[BlockHash], num_tokens: int
    ) -> None:
        """Keep the chain of a choice that has ended.

        hashes       of its committed full blocks
        num_tokens   computed tokens of the choice, prompt and output
        """
        if session is None:
            # A chain that ends within the prompt would be that of every request with this prompt.
            num_tokens = len(hashes) * self._pool.block_size
            if self._max_sessions and num_tokens > len(request.prompt):
                self._add_tip(hashes[-1], (request.tenant, request.id))
            return
        session.num_tokens = max(session.num_tokens, num_tokens)
        if len(hashes) > len(session.chain):
            num_kept = num_common_blocks(session.chain, hashes)
            self._cut(session, num_kept, demote=False)
            self._extend(session, hashes[num_kept:])
            if isinstance(session.key[1], int):
                self._add_tip(hashes[-1], session.key)
            if self._num_hashes > MAX_CHAIN_RATIO * self._pool.num_blocks:
                self._limit_chains()

    def end_turn(self, session: Session, work: int) -> None:
        """Count a request of the session that has ended. The session pauses, or closes if due.

        work   of the scheduler so far
        """
        session.num_live -= 1
        if not session.is_paused:
            return
        self.num_paused += 1
        session.paused_at = work
        if session.has_ended:
            self._close(session, demote=True)
        else:
            self._paused[session.key] = session

    def end(self, key: SessionKey) -> bool:
        """End a session for its client, and return whether it was open.

        It closes now or, with a live request, when that ends. Its blocks that no other chain has
        are then evicted before all others.
        """
        session = self.sessions.get(key)
        if session is None:
            return False
        session.has_ended = True
        if session.is_paused:
            self._close(session, demote=True)
        return True

    def expire(self, key: SessionKey, last_turn: int) -> bool:
        """Close a session that is paused since its turn `last_turn`. Return whether it was.

        Any other changes nothing: it has gone on since the timer was set. Its blocks are no longer
        protected, and count as just used.
        """
        session = self.sessions.get(key)
        if session is None or not session.is_paused_since(last_turn):
            return False
        self._close(session, demote=False)
        return True

    def demote_tail(self, session: Session, num_blocks: int) -> None:
        """Cut `num_blocks` from the end of the chain, or all where it has fewer, and demote them.

        Blocks that another chain has stay protected.
        """
        self._cut(session, max(0, len(session.chain) - num_blocks), demote=True)

    def forget_chains(self) -> None:
        """Forget the blocks of all sessions, and which requests continue an unnamed one.

        Sessions stay open, and get a chain again with their next end of a choice.
        """
        for session in self.sessions.values():
            self._cut(session, 0, demote=False)
            session.num_foreign_blocks = 0
        self.tips.clear()

    @property
    def num_blocks(self) -> int:
        """Blocks in the chains of all open sessions, each counted once; some are evicted."""
        return len(self._num_chains)

    def num_own_blocks(self, session: Session) -> int:
        """Return how many blocks of the chain, at its end, are in no other chain. O(log chain)."""
        # A block that another chain has comes with all blocks before it.
        return len(session.chain) - bisect_left(
            session.chain, True, key=lambda block_hash: self._num_chains[block_hash] == 1
        )

    def _recognise(self, request: Request, hashes: Sequence[BlockHash]) -> Session | None:
        """Return the session whose chain the prompt begins with, the longest one, or None."""
        for index in range(len(hashes) - 1, -1, -1):
            key = self.tips.get((request.tenant, hashes[index]))
            if key is not None:
                is_new = key not in self.sessions
                session = self._open(key)
                if session is not None and is_new:
                    session.num_turns = 1
                    self._extend(session, hashes[: index + 1])
                return session
        return None

    def _open(self, key: SessionKey) -> Session | None:
        """Return the open session of the key, or open one, or return None where none may open."""
        session = self.sessions.get(key)
        if session is not None:
            return session
        of_tenant = self._by_tenant[key[0]]
        if len(of_tenant) >= self._max_sessions:
            paused = [s for s in of_tenant.values() if s.is_paused]
            if not paused:
                return None
            self._close(min(paused, key=lambda s: s.paused_at), demote=False)
        session = self.sessions[key] = self._by_tenant[key[0]][key] = Session(key)
        self.num_paused += 1  # until its turn begins
        return session

    def _close(self, session: Session, *, demote: bool) -> None:
        tenant = session.key[0]
        self.num_paused -= 1
        del self.sessions[session.key], self._by_tenant[tenant][session.key]
        self._paused.pop(session.key, None)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._cut(session, 0, demote=demote)
        self._on_close(session)

    def _cut(self, session: Session, num_kept: int, *, demote: bool) -> None:
        """Cut the chain to `num_kept` blocks. Demote the others that no other chain has."""
        branch = session.chain[num_kept:]
        del session.chain[num_kept:]
        used = (i for i, h in enumerate(branch, 1) if h in self.used_by_others)
        num_used = max(0, session.num_foreign_blocks - num_kept, *used) if demote else 0
        self._count(branch, -1)
        for part, is_demoted in ((branch[num_used:], demote), (branch[:num_used], False)):
            self._pool.unprotect([h for h in part if h not in self._num_chains], demote=is_demoted)

    def _extend(self, session: Session, hashes: Sequence[BlockHash]) -> None:
        """Add blocks to the end of the chain, and protect the whole chain."""
        session.chain += hashes
        self._count(hashes, 1)
        self._pool.protect(session.chain)

    def _limit_chains(self) -> None:
        """Cut each chain after its last block that is cached or used.

        Where that is not enough, the longest-paused sessions close until half of the bound is left.
        """
        for session in self.sessions.values():
            num_kept = len(session.chain)
            while num_kept and not self._pool.lookup(session.chain[num_kept - 1 : num_kept]):
                num_kept -= 1
            self._cut(session, num_kept, demote=False)
        max_hashes = MAX_CHAIN_RATIO * self._pool.num_blocks
        if self._num_hashes > max_hashes:
            paused = [session for session in self.sessions.values() if session.is_paused]
            for session in sorted(paused, key=lambda s: s.paused_at):
                if 2 * self._num_hashes > max_hashes:
                    self._close(session, demote=False)

    def _count(self, hashes: Sequence[BlockHash], change: int) -> None:
        """Change by one, up or down, in how many chains these hashes are."""
        self._num_hashes += change * len(hashes)
        for block_hash in hashes:
            count = self._num_chains.get(block_hash, 0) + change
            if count:
                self._num_chains[block_hash] = count
            else:
                del self._num_chains[block_hash]
                self.used_by_others.discard(block_hash)

    def _add_tip(self, tip: BlockHash, key: SessionKey) -> None:
        self.tips[key[0], tip] = key
        self.tips.move_to_end((key[0], tip))
        if len(self.tips) > MAX_TIPS:
            self.tips.popitem(last=False)
