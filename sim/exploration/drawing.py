"""Drawing of a counterexample: slots, blocks and queue after each action, as text.

Owns the letters and the lines. A request of the menu is a capital letter, its second choice a small
one. Blocks are in order of their ids.

         action           slots  blocks  queue   in flight
      1  add 1            ..     ....    B
      2  add 0            ..     ....    BA
      3  schedule         BA     BBA.            B[0:2) A[0:1)
      4  commit end end   ..     c...

    blocks     a letter: used by that sequence; *: shared; c: cached; p: protected; .: empty
    queue      waiting sequences in order
    sessions   s2: the chain of s has two blocks; s2*: a request of s is live
"""

from __future__ import annotations

from forge.blocks import BlockPool
from forge.policy import Policy
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sequence import Sequence
from forge.sessions import Session
from forge.sim.exploration.search import Counterexample
from forge.sim.exploration.world import Action, State, TinyWorld, create_state, perform

LEGEND = "* shared, c cached, . empty; B[0:2) computes positions 0 and 1 of B"
PLANS_WIDTH = 24
"""Width of the column of plans in flight, where another one follows."""
SESSIONS_LEGEND = "p protected; s2* session s has two blocks and a live request"


def draw(world: TinyWorld, policy: Policy, counterexample: Counterexample) -> str:
    """Return the counterexample as text: a line for each action, then the error."""
    state = create_state(world, policy)
    actions = [*counterexample.path, *counterexample.cycle]
    width = max(len("action"), *(len(str(action)) for action in actions)) if actions else 6
    max_blocks = max(world.config.num_blocks, *world.sizes, 6)
    slots = max(world.config.max_num_seqs, len("slots"))
    num_queued = max(len("queue"), sum(request.params.n for request in world.menu))
    lines = [
        f"{'':7}  {'action':{width}}  {'slots':{slots}}  {'blocks':{max_blocks}}  "
        f"{'queue':{num_queued}}  in flight"
    ]
    has_sessions = bool(world.config.max_sessions)
    if has_sessions:
        lines[0] += f"{'':{PLANS_WIDTH - len('in flight')}}  sessions"
    for number, action in enumerate(actions, 1):
        _perform(world, state, action)
        scheduler = state.scheduler
        plans = " | ".join(_plan(world, scheduler, plan) for plan in scheduler.ledger)
        mark = "again >" if number == len(counterexample.path) + 1 else ""
        lines.append(
            f"{mark or number:>7}  {action!s:{width}}  {_slots(world, scheduler):{slots}}  "
            f"{_blocks(world, scheduler):{max_blocks}}  "
            f"{''.join(letter(s, world) for s in scheduler.waiting):{num_queued}}  "
            f"{plans:{PLANS_WIDTH}}  "
            f"{' '.join(map(_session, scheduler.sessions.values()))}".rstrip()
        )
    legend = f"{LEGEND}; {SESSIONS_LEGEND}" if has_sessions else LEGEND
    return "\n".join([*lines, f"{'':9}{legend}", counterexample.error])


def _perform(world: TinyWorld, state: State, action: Action) -> None:
    try:
        perform(world, state, action)
    except Exception:
        return  # the last action: its error is that of the counterexample


def letter(sequence: Sequence, world: TinyWorld) -> str:
    """Return the letter of a sequence: of its request, small for a second choice."""
    capital = chr(ord("A") + sequence.request.id % len(world.menu))
    return capital.lower() if sequence.choice else capital


def _session(session: Session) -> str:
    name = session.key[1] if isinstance(session.key[1], str) else f"({session.key[1]})"
    return f"{name}{len(session.chain)}{'' if session.is_paused else '*'}"


def _slots(world: TinyWorld, scheduler: Scheduler) -> str:
    owners = {sequence.slot: letter(sequence, world) for sequence in scheduler.running.values()}
    return "".join(owners.get(slot, ".") for slot in range(scheduler.config.max_num_seqs))


def _blocks(world: TinyWorld, scheduler: Scheduler) -> str:
    owners: dict[int, str] = {}
    for sequence in scheduler.running.values():
        for block in sequence.table.blocks:
            owners[block] = "*" if block in owners else letter(sequence, world)
    return "".join(
        owners.get(i) or _free(scheduler.pool, i) for i in range(scheduler.pool.num_blocks)
    )


def _free(pool: BlockPool, block: int) -> str:
    if pool.hash_of(block) is None:
        return "."
    return "c" if pool.count_disposable([block]) else "p"


def _plan(world: TinyWorld, scheduler: Scheduler, plan: StepPlan) -> str:
    return " ".join(
        f"{letter(scheduler.sequences[row.seq_id], world)}[{row.start}:{row.end})"
        for row in plan.rows
        if row.seq_id in scheduler.sequences
    )
