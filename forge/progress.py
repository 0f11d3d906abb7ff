"""Progress of LLM.generate: a bar on a terminal, for a batch that takes long.

Owns when the bar is shown. Knows an OutputBatch, and no engine.

    generating:  38%|███▊      | 97/256 [00:12<00:19, 8.1req/s, 10,412 tokens/s]

Always true: nothing is written within SHOW_AFTER_S, nor where standard error is no terminal. The
bar is that of tqdm, which transformers needs; where tqdm is not installed there is no bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from forge.outputs import OutputBatch

SHOW_AFTER_S = 2.0
INTERVAL_S = 0.5
"""Seconds between two counts of the tokens, which read every open output of the batch."""


class GenerationProgress:
    """A bar of the finished requests and of the output tokens per second, until its block ends."""

    def __init__(
        self,
        batch: OutputBatch,
        *,
        is_enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = batch
        self._clock = clock
        self._start_s = clock()
        self._next_s = self._start_s + INTERVAL_S
        self._bar = _create_bar(len(batch.outputs)) if is_enabled else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._count(self._bar, self._clock())
            self._bar.close()

    def update(self) -> None:
        """Count again if INTERVAL_S has passed. Called after each step."""
        if self._bar is None:
            return
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self._count(self._bar, now_s)

    def _count(self, bar: Any, now_s: float) -> None:
        tokens_per_s = self._batch.count_tokens() / max(now_s - self._start_s, 1e-9)
        bar.set_postfix_str(f"{tokens_per_s:,.0f} tokens/s", refresh=False)
        bar.update(self._batch.num_finished - bar.n)


def _is_terminal(stream: Any) -> bool:
    """Return False also for a stream that is closed, or that is a logger without a descriptor."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _create_bar(num_requests: int) -> Any:
    """Return a bar on standard error, or None where that is no terminal or tqdm is missing."""
    if not _is_terminal(sys.stderr):
        return None
    try:
        from tqdm import tqdm  # imported where a bar may be shown
    except ImportError:
        return None
    return tqdm(
        total=num_requests,
        desc="generating",
        unit="req",
        dynamic_ncols=True,
        delay=SHOW_AFTER_S,
        mininterval=0.0,
        miniters=0,
    )
