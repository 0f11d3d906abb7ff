"""Order the events of steps at depth 2, and name the rule that forbids each wrong order.

1. `order`: the host's events of a run, for one request that computes `num_steps` steps of a token
   each. An event is "schedule n" (make plan n), "launch n" (give it to the device, which returns at
   once), "read n" (wait for the tokens of step n) or "commit n" (append them). At depth 1 a plan is
   made when the step before is committed; at depth 2 when at most one other is in flight.
2. `FORBIDDEN_BY`: each of the orders below loses or corrupts something. Which rule forbids it?

   a   Sequence 1 is preempted while plan 4 computes its token; it is admitted again in plan 5, and
       plan 4 is committed after that.
   b   Plan 4 samples the last token of sequence 1. Plan 5 lacks a block, so sequence 2 is
       preempted; then plan 4 is committed, and four blocks are free.
   c   Plan 4 computes the last positions of block 7. Plan 5 admits a request with the same prompt
       on block 7; then plan 4 fails.
   d   Sequence 1 is preempted and admitted again, with other blocks; then a plan from before is
       committed, and what it computed is published under the new blocks.
   e   Plan 5 is made with a placeholder for the token that plan 4 samples, and launched as it is.

The rules:

   epoch       a result for blocks that a sequence has lost changes nothing but its tokens
   last token  nothing is preempted while a commit in flight frees blocks
   own token   a preempted sequence keeps its token in flight, and waits for that commit
   publish     other requests find a block after the commit of the step that filled it
   reference   an input that is in flight is named by its plan and row; the device reads it

The check records the events of the real engine, for drawn numbers of steps and both depths.
"""

FORBIDDEN_BY = {
    "a": "own token",
    "b": "last token",
    "c": "publish",
    "d": "epoch",
    "e": "reference",
}


def order(num_steps: int, depth: int) -> list[str]:
    """Return the events of the host, in order: schedule, launch, read and commit of each step."""
    events: list[str] = []
    for step in range(num_steps):
        events += [f"schedule {step}", f"launch {step}"]
        if step >= depth - 1:
            events += [f"read {step - depth + 1}", f"commit {step - depth + 1}"]
    for step in range(max(0, num_steps - depth + 1), num_steps):
        events += [f"read {step}", f"commit {step}"]
    return events
