"""A Model out of any `logits(context)` function: the twenty-line way to bring your own.

Owns pages of token ids, the slots' block tables and the tokens each slot was told. Knows no
scheduler or pool: it does what a plan says, in order, and reads every context back through the
block table, so a wrong block gives a wrong token.

    plan ──► copies ──► per row: table = table[:keep] + new_blocks
                                 pages[table[p // size]][p % size] = input      for p in the row
                                 logits(context read back) ── sampling.choose ──► token

    class Parrot:
        def logits(self, context):                  # one float per token of the vocabulary
            return [1.0 if t == context[-1] else 0.0 for t in range(257)]
    model = LogitsModel(Parrot().logits, vocab_size=257, eos_token=0, num_blocks=64, block_size=16)
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.request import TokenLogprob
from forge.sampling import RULED_OUT, adjusted, choose, token_logprob, unusable
from forge.seam import Bind, Row, RowOutput, StepOutput, StepPlan

_UNWRITTEN = -1
"""Content of a position that nobody wrote. Never a token id, so reading one is seen at once."""


class Faults(NamedTuple):
    """What goes wrong, for tests and simulation.

    forward   called with each plan as it is accepted; what it raises, `forward` raises
    result    called with each plan as it ends; what it raises, `result` raises; what it returns
              names rows by index and the error each of them gets
    """

    forward: Callable[[StepPlan], None] = lambda plan: None
    result: Callable[[StepPlan], Mapping[int, str]] = lambda plan: {}


NO_FAULTS = Faults()


@dataclass(slots=True)
class _Slot:
    """State that a device keeps for the sequence in one row of its tables."""

    bind: Bind
    table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class ComputedStep(NamedTuple):
    """A PendingStep whose arithmetic is done; `result` lets the device's time pass."""

    plan: StepPlan
    output: StepOutput
    faults: Faults
    ready_s: float

    def result(self) -> StepOutput:
        """The step's output, with the rows that `faults` names replaced by errors."""
        if self.ready_s:
            time.sleep(max(0.0, self.ready_s - time.monotonic()))
        errors = self.faults.result(self.plan)
        if not errors:
            return self.output
        rows = (
            RowOutput(error=errors[i]) if i in errors else out
            for i, out in enumerate(self.output.rows)
        )
        return self.output._replace(rows=tuple(rows))


class LogitsModel:
    """Serves `logits(context)`, a pure function from token ids to one float per token.

    step_s   seconds that a step takes on the imagined device, which runs one step after the other
    """

    def __init__(
        self,
        logits: Callable[[Sequence[int]], Sequence[float]],
        *,
        vocab_size: int,
        eos_token: int,
        num_blocks: int,
        block_size: int,
        num_layers: int = 1,
        faults: Faults = NO_FAULTS,
        step_s: float = 0.0,
    ) -> None:
        self._logits = logits
        self._vocab_size = vocab_size
        self._eos_token = eos_token
        self._num_layers = num_layers
        self._block_size = block_size
        self._pages = [self._blank() for _ in range(num_blocks)]
        self._slots: dict[int, _Slot] = {}
        self._sampled: dict[int, list[int]] = {}
        self._faults = faults
        self._step_s = step_s
        self._free_s = 0.0

    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def num_layers(self) -> int:
        """Layers whose state a block holds."""
        return self._num_layers

    def eos_token(self) -> int:
        """The id that ends an output."""
        return self._eos_token

    def forward(self, plan: StepPlan) -> ComputedStep:
        """Do the plan's copies and rows, in order."""
        if plan.block_size != self._block_size:
            raise InvalidConfig(
                "block_size",
                f"the model keeps {self._block_size} positions a block, the engine "
                f"{plan.block_size}",
                "Give both the same",
            )
        self._faults.forward(plan)
        grown = plan.num_blocks - len(self._pages)
        del self._pages[plan.num_blocks :]
        self._pages += [self._blank() for _ in range(grown)]
        for source, target in plan.copies:
            self._pages[target][:] = self._pages[source]
        # A plan names tokens of the plan before it; older ones are never named again.
        sampled: list[int] = []
        before = self._sampled.get(plan.step - 1, [])
        self._sampled = {plan.step - 1: before, plan.step: sampled}
        rows = []
        for row in plan.rows:
            output = self._compute(row)
            rows.append(output)
            sampled.append(output.tokens[0] if output.tokens else _UNWRITTEN)
        ready_s = 0.0
        if self._step_s:
            ready_s = self._free_s = max(time.monotonic(), self._free_s) + self._step_s
        return ComputedStep(plan, StepOutput(plan.step, tuple(rows)), self._faults, ready_s)

    def _blank(self) -> array[int]:
        return array("i", [_UNWRITTEN]) * self._block_size

    def _compute(self, row: Row) -> RowOutput:
        if row.bind is not None:
            self._slots[row.slot] = _Slot(row.bind, [], list(row.bind.history))
        slot = self._slots[row.slot]
        slot.table[row.keep :] = row.new_blocks
        inputs = [*row.tokens, *(self._sampled[ref.step][ref.row] for ref in row.refs)]
        if _UNWRITTEN in inputs:
            return RowOutput(error="its input comes from a row that failed")
        self._write(slot, row.start, inputs)
        try:
            return self._answer(slot, row)
        except Exception as fault:  # of `logits`, for this context: other rows have theirs
            return RowOutput(error=f"logits: {fault!r}")

    def _answer(self, slot: _Slot, row: Row) -> RowOutput:
        scores = self._prompt_scores(slot, row.start, row.end)
        if any(isnan(score.logprob) for score in scores):
            return RowOutput(error="the model's logits are not finite at a prompt position")
        if not row.num_samples:
            return RowOutput(prompt_logprobs=scores)
        logits = self._logits(self._context(slot.table, row.end))
        error = unusable(logits)
        if len(logits) != self._vocab_size:
            error = f"logits: {len(logits)} numbers for a vocabulary of {self._vocab_size}"
        if error is not None:
            return RowOutput(error=error)
        return self._sample(slot, row, logits, scores)

    def _write(self, slot: _Slot, start: int, inputs: list[int]) -> None:
        size = self._block_size
        for position, token in enumerate(inputs, start):
            self._pages[slot.table[position // size]][position % size] = token
        params = slot.bind.params
        if params.penalises or params.prompt_logprobs is not None:
            told = slot.tokens[start : start + len(inputs)]
            assert told == inputs[: len(told)], f"inputs at {start} differ from the slot's history"
            slot.tokens += inputs[len(told) :]

    def _context(self, table: list[int], end: int) -> array[int]:
        """Tokens [0, end), read back through the block table."""
        context = array("i")
        for block in table[: -(-end // self._block_size)]:
            context += self._pages[block]
        del context[end:]
        return context

    def _prompt_scores(self, slot: _Slot, start: int, end: int) -> tuple[TokenLogprob, ...]:
        count = slot.bind.params.prompt_logprobs
        if count is None:
            return ()
        return tuple(
            token_logprob(self._logits(self._context(slot.table, p)), slot.tokens[p], count)
            for p in range(start + 1, min(end, slot.bind.prompt_len - 1) + 1)
        )

    def _sample(
        self, slot: _Slot, row: Row, logits: Sequence[float], scores: tuple[TokenLogprob, ...]
    ) -> RowOutput:
        params, prompt_len, position = slot.bind.params, slot.bind.prompt_len, row.end
        prompt: Sequence[int] = ()
        output: Sequence[int] = range(position - prompt_len)  # only its length matters here
        if params.penalises:
            prompt, output = slot.tokens[:prompt_len], slot.tokens[prompt_len:]
        allowed = adjusted(logits, params, prompt, output, slot.bind.end_ids, row.mask)
        if max(allowed) == -inf:
            return RowOutput(error=RULED_OUT)
        token = choose(allowed, params, slot.bind.seed, position)
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            logprobs = (token_logprob(logits, token, params.logprobs),)
        return RowOutput((token,), logprobs, scores)
