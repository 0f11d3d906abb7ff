"""ProbePlans: plans that are timed before a model serves.

Owns their slots, blocks and step numbers, which are far below an engine's. Knows no model or clock.

    slot 0   [ 0 1 2 ]    slot 1   [ 3 4 5 ]    ...     blocks, bound by the first plan
    step     .....|ppppppppp|                           a chunk of slot 0 after other positions
             ....|d  ....|d  ppp                        decode rows of other slots, and a chunk
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from forge.config import EngineConfig
from forge.request import SamplingParams
from forge.seam import Bind, HostLoad, HostStore, Row, StepPlan


class ProbePlans:
    """Builder of plans over slots with `blocks_per_slot` blocks each, of arbitrary contents."""

    def __init__(self, config: EngineConfig, num_slots: int, slot_len: int) -> None:
        self._config = config
        self._slot_len = slot_len
        self.blocks_per_slot = -(-slot_len // config.block_size)
        self._num_slots = num_slots
        self._steps = count(-(2**40))

    @property
    def fits(self) -> bool:
        """True where the cache, the batch and the longest sequence have room for the slots."""
        config = self._config
        return (
            self._num_slots * self.blocks_per_slot <= config.num_blocks
            and self._num_slots <= config.max_num_seqs
            and self._slot_len < config.max_model_len
        )

    def bind_plan(self) -> StepPlan:
        """Return a plan that binds every slot and gives it its blocks."""
        rows = []
        for slot in range(self._num_slots):
            first = slot * self.blocks_per_slot
            blocks = tuple(range(first, first + self.blocks_per_slot))
            bind = Bind(SamplingParams(temperature=0.0), slot, 1)
            rows.append(Row(slot, 0, slot, 0, (0,), new_blocks=blocks, bind=bind))
        return self._build_plan(rows)

    def step_plan(
        self, num_tokens: int, start: int, num_decodes: int = 0, context_len: int = 0
    ) -> StepPlan:
        """Return decode rows after `context_len` positions, and a chunk after `start` of them.

        The chunk has the first slot.
        """
        keep = self.blocks_per_slot
        rows = [
            Row(slot, 0, slot, context_len, (0,), keep=keep, num_samples=1)
            for slot in range(1, 1 + num_decodes)
        ]
        chunk = Row(0, 0, 0, start, (0,) * num_tokens, keep=keep, num_samples=1)
        return self._build_plan([*rows, chunk])

    def store_plan(self, num_blocks: int) -> StepPlan:
        """Return a plan that stores the last blocks of the cache in the first ones of the host."""
        stores = (HostStore(block, host_block) for host_block, block in self._moved(num_blocks))
        return self._build_plan([])._replace(stores=tuple(stores))

    def load_plan(self, num_blocks: int) -> StepPlan:
        """Return a plan that loads what `store_plan` of at least as many blocks has stored."""
        loads = (HostLoad(0, 0, block, host_block) for host_block, block in self._moved(num_blocks))
        return self._build_plan([])._replace(loads=tuple(loads))

    def _moved(self, num_blocks: int) -> Iterable[tuple[int, int]]:
        """Return host blocks and blocks. Slots have the first blocks of the cache."""
        return enumerate(range(self._config.num_blocks - num_blocks, self._config.num_blocks))

    def _build_plan(self, rows: list[Row]) -> StepPlan:
        config, tier = self._config, self._config.host_tier
        return StepPlan(
            next(self._steps),
            tuple(rows),
            config.num_blocks,
            config.block_size,
            num_host_blocks=0 if tier is None else tier.num_blocks,
        )
