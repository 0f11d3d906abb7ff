"""Working set: the oldest sessions whose blocks fit together go on; later ones wait for them.

Under first come, first served the blocks of a session are evicted while its tool runs, and each
turn computes its whole context again. Here a turn is admitted if its session is in the working set:
the sessions in order of age, for as long as their blocks and some growth fit in the cache. Tenants
have equal shares of it, and what a tenant leaves goes to the others. Requests that belong to no
session wait for none. The device never idles for a pause: where nothing runs, the oldest session is
admitted.

Denning 1968 (working sets). Whole programs that pause: ThunderAgent (arXiv 2602.13692).
"""

from collections import Counter
from collections.abc import Collection, Sequence

from forge.policy import FCFS, Candidate, PolicyContext, oldest_overtaken
from forge.sessions import Session, SessionKey

GROWTH = 1.15
"""Room for a session to grow, as a factor of its own tokens now."""

CACHE_SHARE = 0.95
"""Share of the cache that the working set may fill. The rest is for requests without a session."""

MAX_OVERTAKEN = 256
"""Admissions of later sequences after which a sequence is admitted in any case."""


def needed_tokens(
    live: Collection[Candidate], context: PolicyContext
) -> dict[SessionKey, tuple[float, int]]:
    """Return the tokens that each session needs, and those that it shares with others, by age.

    live   waiting and running sequences
    """
    lengths: dict[SessionKey, int] = {}
    for c in live:
        if c.session is not None:
            length = len(c.request.prompt) + c.num_output
            lengths[c.session.key] = max(length, lengths.get(c.session.key, 0))
    needs = {}
    for key, session in context.sessions.items():
        num_shared = len(session.chain) - context.num_own_blocks(session)
        shared = num_shared * context.block_size
        length = max(lengths.get(key, 0), session.num_tokens)
        needs[key] = GROWTH * max(0, length - shared), shared
    return needs


def working_set(live: Collection[Candidate], context: PolicyContext) -> set[SessionKey]:
    """Return the sessions that fit in the cache together, the oldest first within each share.

    Blocks that sessions share, such as a system prompt, count once.
    """
    needs = needed_tokens(live, context)
    left = CACHE_SHARE * context.num_blocks * context.block_size
    left -= max((shared for _, shared in needs.values()), default=0)
    share = left / max(1, len({tenant for tenant, _ in needs}))
    used: Counter[str] = Counter()
    found: set[SessionKey] = set()
    for limit in (share, left):  # what the shares leave goes to the oldest
        full = set[str]()
        for key, (need, _) in needs.items():
            tenant = key[0]
            if key in found or tenant in full:
                continue
            if found and (need > left or used[tenant] + need > limit):
                full.add(tenant)  # its newer sessions do not pass this one
                continue
            found.add(key)
            used[tenant] += round(need)
            left -= need
    return found


def admit_by_age(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return a resumed sequence, one without a session, or the oldest session's in the set."""
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    urgent = [c for c in waiting if c.request.priority == waiting[0].request.priority]
    turns = []
    for c in urgent:
        if c.session is None or c.num_served:
            return c
        turns.append((c, c.session.key))
    inside = working_set((*context.running, *waiting), context)
    age = {key: number for number, key in enumerate(context.sessions)}
    allowed = [(c, key) for c, key in turns if key in inside]
    if not allowed and context.running:
        return None
    return min(allowed or turns, key=lambda turn: (age[turn[1]], turn[0].id))[0]


def evict_newest(sessions: Sequence[Session], context: PolicyContext) -> Session:
    """Return the newest session outside the working set, or the newest of all."""
    inside = working_set(context.running, context)
    return next((s for s in reversed(sessions) if s.key not in inside), sessions[-1])


policy = FCFS._replace(admit=admit_by_age, evict=evict_newest)
