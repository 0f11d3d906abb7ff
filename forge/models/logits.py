"""LogitsModel: a Model from any `logits(context)` function, the shortest way to bring your own.

Owns blocks of token ids. It reads every context back through the block table, so a wrong block
gives a wrong token. Steps, slots and sampling are PagedModel's.

    row ──► blocks[table[p // size]][p % size] = input     for p in the row
        ──► logits(context read back)

    class Parrot:
        def logits(self, context):                  # one float per token of the vocabulary
            return [1.0 if t == context[-1] else 0.0 for t in range(257)]
    model = LogitsModel(Parrot().logits, vocab_size=257, eos_token=0, num_blocks=64, block_size=16)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from forge.models.file_moves import FileMoves
from forge.models.host_blocks import HostBlocks
from forge.models.paged import NO_FAULTS, ComputedStep, FaultHooks, PagedModel
from forge.models.paged_decoder import BlockRow, RowLogits
from forge.seam import Row, StepPlan
from forge.weights import PartTimes

_UNWRITTEN = -1
"""Content of a position that was never written. It is no token id, so a read of it is detected."""


class ContextDecoder:
    """Blocks of token ids, and a function from the context to logits. A PagedDecoder.

    logits       pure function from token ids to one float per token
    num_layers   layers that the model says it has; there is nothing to keep for each
    """

    def __init__(
        self,
        logits: Callable[[Sequence[int]], Sequence[float]],
        vocab_size: int,
        num_layers: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.block_size = block_size
        self._logits = logits
        self._block_tokens = [self._new_block() for _ in range(num_blocks)]
        self._content_offset = 0

    def _new_block(self) -> array[int]:
        return array("i", [_UNWRITTEN]) * self.block_size

    def pages(self) -> list[array[int]]:
        """Return the token ids of the blocks."""
        return self._block_tokens

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks. The first ones keep their contents."""
        grown = num_blocks - len(self._block_tokens)
        del self._block_tokens[num_blocks:]
        self._block_tokens += [self._new_block() for _ in range(grown)]

    def forward(self, rows: Sequence[BlockRow]) -> list[RowLogits]:
        """Write the rows' inputs into their blocks, and return the logits of each row.

        Logits are computed when they are read.
        """
        for row in rows:
            self.write(row.table, row.start, row.tokens)
        return [self._row_logits(row.table) for row in rows]

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Write tokens at the positions from `start` on."""
        size = self.block_size
        for position, token in enumerate(tokens, start):
            content = token + self._content_offset
            self._block_tokens[table[position // size]][position % size] = content

    def _row_logits(self, table: Sequence[int]) -> RowLogits:
        return lambda end: self._logits(self._context(table, end))

    def _context(self, table: Sequence[int], end: int) -> array[int]:
        """Return tokens [0, end), read back through the block table."""
        context = array("i")
        for block in table[: -(-end // self.block_size)]:
            context += self._block_tokens[block]
        del context[end:]
        if self._content_offset:
            return array("i", [content - self._content_offset for content in context])
        return context

    def clear(self) -> None:
        """Drop the content of all blocks."""
        self._block_tokens = [self._new_block() for _ in self._block_tokens]

    def mark_content_stale(self) -> None:
        """Give every position that was written so far another meaning, in files too.

        So a read of what other weights have computed gives a wrong token.
        """
        self._content_offset += self.vocab_size

    def unwrite(self, table: Sequence[int], start: int, end: int) -> None:
        """Overwrite positions [start, end): reading one again is detected."""
        for position in range(start, end):
            block = table[position // self.block_size]
            self._block_tokens[block][position % self.block_size] = _UNWRITTEN


class LogitsModel(PagedModel):
    """Model of `logits(context)`, a pure function from token ids to one float per token.

    step_s        seconds of a step on the imagined device, which runs one step after the other
    draft         draft model with the same vocabulary, or None. Only this model gives it plans
    files         files of host blocks; None: there are none
    host_blocks   contents of the host pool; None: a plain HostBlocks
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
        faults: FaultHooks = NO_FAULTS,
        step_s: float = 0.0,
        draft: PagedModel | None = None,
        files: FileMoves | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self._context_decoder = ContextDecoder(
            logits, vocab_size, num_layers, num_blocks, block_size
        )
        super().__init__(
            self._context_decoder,
            eos_token=eos_token,
            faults=faults,
            step_s=step_s,
            draft=draft,
            files=files,
            host_blocks=host_blocks,
        )
        self._is_asleep = False

    def forward(self, plan: StepPlan) -> ComputedStep:
        """Execute a plan, as PagedModel does."""
        assert not self._is_asleep, f"plan {plan.step} is for a model that sleeps"
        return super().forward(plan)

    def sleep(self, level: int) -> PartTimes:
        """Drop the content of all blocks, and refuse plans until `wake`."""
        self._is_asleep = True
        self._context_decoder.clear()
        return (("kv_cache", 0.0),)

    def wake(self) -> PartTimes:
        """Accept plans again."""
        self._is_asleep = False
        return (("kv_cache", 0.0),)

    def mark_content_stale(self) -> None:
        """Give every position that was written so far another meaning, in files too."""
        self._context_decoder.mark_content_stale()

    def poison(self, row: Row) -> None:
        """Overwrite the row's positions, for tests and simulation: reading one again is detected.

        Call it between the `forward` of the row's plan and the next `forward`.
        """
        self._context_decoder.unwrite(self.block_table(row.slot), row.start, row.end)
