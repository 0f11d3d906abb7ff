"""Drawing of a counterexample: slots, blocks and queue after each action, as text.

Owns the letters and the lines. A request of the menu is a capital letter, its second choice a small
one. Blocks are in order of their ids.

         action           slots  blocks  queue   in flight
      1  add 1            ..     ....    B
      2  add 0            ..     ....    BA
      3  schedule         BA     BBA.            B[0:2) A[0:1)
      4  commit end end   ..     c...

    blocks   a letter: used by that sequence; *: shared; c: cached; .: empty
    queue    waiting sequences in order
"""

from __future__ import annotations

from forge.blocks import BlockPool
from forge.policy import Policy
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sequence import Sequence
from forge.sim.exploration.search import Counterexample
from forge.sim.exploration.world import Action, State, TinyWorld, create_state, perform

LEGEND = "* shared, c cached, . empty; B[0:2) computes positions 0 and 1 of B"


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
    for number, action in enumerate(actions, 1):
        _perform(world, state, action)
        scheduler = state.scheduler
        mark = "again >" if number == len(counterexample.path) + 1 else ""
        lines.append(
            f"{mark or number:>7}  {action!s:{width}}  {_slots(scheduler):{slots}}  "
            f"{_blocks(scheduler):{max_blocks}}  "
            f"{''.join(map(letter, scheduler.waiting)):{num_queued}}  "
            f"{' | '.join(_plan(scheduler, plan) for plan in scheduler.ledger)}".rstrip()
        )
    return "\n".join([*lines, f"{'':9}{LEGEND}", counterexample.error])


def _perform(world: TinyWorld, state: State, action: Action) -> None:
    try:
        perform(world, state, action)
    except Exception:
        return  # the last action: its error is that of the counterexample


def letter(sequence: Sequence) -> str:
    """Return the letter of a sequence: of its request, small for a second choice."""
    capital = chr(ord("A") + sequence.request.id)
    return capital.lower() if sequence.choice else capital


def _slots(scheduler: Scheduler) -> str:
    owners = {sequence.slot: letter(sequence) for sequence in scheduler.running.values()}
    return "".join(owners.get(slot, ".") for slot in range(scheduler.config.max_num_seqs))


def _blocks(scheduler: Scheduler) -> str:
    owners: dict[int, str] = {}
    for sequence in scheduler.running.values():
        for block in sequence.table.blocks:
            owners[block] = "*" if block in owners else letter(sequence)
    return "".join(
        owners.get(i) or _free(scheduler.pool, i) for i in range(scheduler.pool.num_blocks)
    )


def _free(pool: BlockPool, block: int) -> str:
    return "." if pool.hash_of(block) is None else "c"


def _plan(scheduler: Scheduler, plan: StepPlan) -> str:
    return " ".join(
        f"{letter(scheduler.sequences[row.seq_id])}[{row.start}:{row.end})"
        for row in plan.rows
        if row.seq_id in scheduler.sequences
    )
