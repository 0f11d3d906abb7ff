"""The worlds that are explored: each is the smallest one in which something can go wrong.

Owns their sizes and requests. Blocks have two tokens. A request is described by its prompt, its
largest output and what else is set.

    world        blocks  slots  budget  requests
    pair              4      2       3  two equal ones that do not fit together
    lengths           4      2       3  a long prompt and two short ones; nothing fails
    forks             5      3       4  one with n=2, and one that shares a prefix with it
    priorities        4      2       3  an urgent one and another
    exempt            6      2       2  an urgent one that always preempts a long one; no sharing
    structure         4      2       3  one with a grammar: its masks follow one plan later
    resize            4      2       3  two, in a pool that shrinks and grows
    host              3      2       3  two that evict each other to a host pool of three blocks
    host-filter       3      2       3  the same with two host blocks, stored at a second touch
    host-busy         4      2       3  one that loads a block a plan while the other computes
    sessions          4      2       4  two turns of a session, and one that shares its prefix
    recognised        4      2       4  two that name no session, the second continues the first
    agents            4      2       4  turns of two sessions that do not fit together
    crowded           3      2       4  turns of three sessions, of which two may be open
    mixed             6      3       4  turns of two sessions, one with n=2, and every fault
"""

from __future__ import annotations

from dataclasses import replace

from forge.config import EngineConfig, HostTier
from forge.errors import InvalidConfig
from forge.request import Request, SamplingParams, Structure
from forge.sim.exploration.world import ABORT, CLOSES, EXPIRE, FAULTS, RESET, VOID, TinyWorld

A, B = 1, 2
BLOCK_SIZE = 2


def _request(
    request_id: int,
    prompt: tuple[int, ...],
    max_tokens: int,
    n: int = 1,
    priority: int = 0,
    structure: Structure | None = None,
    session_id: str = "",
    session_end: bool = False,
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, structure=structure)
    return Request(
        request_id, prompt, params, priority, session_id=session_id, session_end=session_end
    )


def _world(
    name: str,
    config: EngineConfig,
    menu: tuple[Request, ...],
    faults: tuple[str, ...] = FAULTS,
    sizes: tuple[int, ...] = (),
) -> TinyWorld:
    values = [replace(request, id=0) for request in menu]
    kinds = tuple(values.index(value) for value in values)
    return TinyWorld(name, config, menu, kinds, faults, sizes)


def _config(
    num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int, max_sessions: int = 0
) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_blocks * BLOCK_SIZE + 1,
        depth=2,
        max_sessions=max_sessions,
    )


PAIR = _world(
    "pair",
    _config(4, 2, 3),
    (_request(0, (A, B, A), 4), _request(1, (A, B, A), 4)),
)
LENGTHS = _world(
    "lengths",
    _config(4, 2, 3),
    (_request(0, (A,), 5), _request(1, (A, B, A, B), 2), _request(2, (A,), 5)),
    faults=(),
)
FORKS = _world(
    "forks",
    _config(5, 3, 4),
    (_request(0, (A, B), 2, n=2), _request(1, (A, B, A), 2)),
)
PRIORITIES = _world(
    "priorities",
    _config(4, 2, 3),
    (_request(0, (A, A), 4), _request(1, (A,), 6, priority=1)),
    faults=(ABORT, VOID),
)
EXEMPT = _world(
    "exempt",
    replace(_config(6, 2, 2), enable_prefix_caching=False),
    (_request(0, (A, A), 6), _request(1, (A, B, A, B, A, B), 1, priority=1)),
    faults=(),
)
STRUCTURE = _world(
    "structure",
    _config(4, 2, 3),
    (_request(0, (A, B), 3, structure=Structure.regex("a*")), _request(1, (B,), 3)),
)
RESIZE = _world(
    "resize",
    _config(4, 2, 3),
    (_request(0, (A, B, A), 2), _request(1, (A, B), 3)),
    faults=(ABORT,),
    sizes=(3, 4),
)
HOST = _world(
    "host",
    replace(
        _config(3, 2, 3),
        host_tier=HostTier(num_blocks=3, max_moved_blocks=1, min_clean_percent=100, min_touches=1),
    ),
    (_request(0, (A, B, A, B, A), 1), _request(1, (A, B, B), 3)),
    faults=(ABORT, VOID, RESET),
)
HOST_FILTER = _world(
    "host-filter",
    replace(
        _config(3, 2, 3),
        host_tier=HostTier(num_blocks=2, max_moved_blocks=None, min_clean_percent=50),
    ),
    (_request(0, (A, B, A, B, A), 1), _request(1, (B, B, A), 2)),
    faults=(ABORT, VOID),
)
HOST_BUSY = _world(
    "host-busy",
    replace(
        _config(4, 2, 3),
        host_tier=HostTier(num_blocks=2, max_moved_blocks=1, min_clean_percent=75, min_touches=1),
    ),
    (_request(0, (A, B, A, B, A), 1), _request(1, (B,), 4)),
    faults=(ABORT,),
)
SESSIONS = _world(
    "sessions",
    _config(4, 2, 4, max_sessions=2),
    (
        _request(0, (A, B), 3, session_id="s"),
        _request(1, (A, B, A, A, B), 2, session_id="s", session_end=True),
        _request(2, (A, B, B), 2),
    ),
    faults=CLOSES,
)
RECOGNISED = _world(
    "recognised",
    _config(4, 2, 4, max_sessions=1),
    (
        _request(0, (A, B), 3),
        _request(1, (A, B, A, A, B), 2),
        _request(2, (B,), 2, session_id="s"),
    ),
    faults=CLOSES,
)
AGENTS = _world(
    "agents",
    _config(4, 2, 4, max_sessions=2),
    (
        _request(0, (A, B), 2, session_id="s"),
        _request(1, (A, B, A, B), 2, session_id="s"),
        _request(2, (A, B, B), 2, session_id="t"),
    ),
    faults=(EXPIRE,),
)
CROWDED = _world(
    "crowded",
    _config(3, 2, 4, max_sessions=2),
    (
        _request(0, (A, B), 1, session_id="s"),
        _request(1, (B, A), 1, session_id="t"),
        _request(2, (B, B), 1, session_id="u"),
    ),
    faults=(),
)
MIXED = _world(
    "mixed",
    _config(6, 3, 4, max_sessions=2),
    (
        _request(0, (A, B, A), 3, n=2, session_id="s"),
        _request(1, (A, B, A, A, B), 3, session_id="s"),
        _request(2, (A, B, B), 5, session_id="t"),
    ),
    faults=(*FAULTS, *CLOSES),
    sizes=(4, 6),
)

WORLDS = {
    world.name: world
    for world in (
        *(
            PAIR,
            LENGTHS,
            FORKS,
            PRIORITIES,
            EXEMPT,
            STRUCTURE,
            RESIZE,
            HOST,
            HOST_FILTER,
            HOST_BUSY,
        ),
        *(SESSIONS, RECOGNISED, AGENTS, CROWDED, MIXED),
    )
}
"""Worlds by name, with up to two plans in flight."""


def find_world(name: str, depth: int) -> TinyWorld:
    """Return the world of that name with up to `depth` plans in flight. Raises InvalidConfig."""
    if name not in WORLDS:
        raise InvalidConfig("world", f"{name[:64]!r} is not known", f"Give {', '.join(WORLDS)}")
    return WORLDS[name].with_depth(depth)
