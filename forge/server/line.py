"""The line before the engine: how many requests may wait for their first token, and how long.

Owns the count. It is of this side alone: a request waits from when it is accepted to when its first
delta has come back. So it is exact between two steps too, and what the engine holds back never
exceeds it. A request that was preempted has had its first token and counts no more.

    accepted ──► waiting ──────────────► begun ─────────► ended
                 at most max_queue       the first delta
                 queue_timeout ──► 503
    one more ──► 429 queue_full          request_timeout, of all of it ──► 504
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forge.async_llm import AsyncLLM
from forge.compiler import CompilerEnded, CompilerFull, StructureCompiler
from forge.errors import InvalidRequest
from forge.limits import DEFAULT_LIMITS, Limits
from forge.request import SamplingParams
from forge.server.refusal import (
    compiler_ended,
    compiler_full,
    past_deadline,
    queue_full,
    queue_timeout,
)

LONGEST_RETRY_S = 60


class Line:
    """Requests on their way to one engine.

    waiting   accepted, and no token has come of them
    """

    def __init__(self, llm: AsyncLLM, limits: Limits = DEFAULT_LIMITS) -> None:
        self.llm = llm
        self.limits = limits
        self.waiting = 0
        self._compiler = StructureCompiler(lambda: llm.engine.structures.vocabulary())
        self._to_compile = 0
        self._last_wait_s = 0.0

    @property
    def retry_after_s(self) -> int:
        """When asking again makes sense: as long from now as the last that began has waited."""
        return min(max(1, math.ceil(self._last_wait_s)), LONGEST_RETRY_S)

    def close(self) -> None:
        """End what compiles structures. May take some seconds: call it in a thread."""
        self._compiler.close()

    def check(self, count: int) -> None:
        """Raise unless `count` more may wait: InvalidRequest if they never could, or Refused."""
        most = self.limits.max_queue
        if count > most:
            raise InvalidRequest(
                "prompt",
                f"{count} prompts are more than the {most} that may wait",
                "Send fewer at a time",
                "too_many_prompts",
            )
        if self.waiting + count > most:
            raise queue_full(most, self.retry_after_s)

    async def prepare(self, params: SamplingParams) -> None:
        """The structure of the output can be compiled, where there is one. Raises InvalidRequest.

        Other processes compile it, under limits. It waits for them as long as for the engine:
        Refused after that, or where as many wait as may.
        """
        structure = params.structure
        if structure is None or self.llm.engine.structures.accepted(structure) is not None:
            return
        if self._to_compile >= self.limits.max_queue:
            raise queue_full(self.limits.max_queue, self.retry_after_s)
        self._to_compile += 1
        try:
            async with asyncio.timeout(self.limits.queue_timeout):
                lane = await asyncio.wrap_future(self._compiler.check(structure))
        except TimeoutError:
            raise queue_timeout(self.limits.queue_timeout, self.retry_after_s) from None
        except CompilerFull as full:
            raise compiler_full(str(full), self.retry_after_s) from None
        except CompilerEnded as ended:
            raise compiler_ended(str(ended)) from None
        finally:
            self._to_compile -= 1
        self.llm.engine.structures.accept(structure, lane)

    @asynccontextmanager
    async def joined(self, count: int) -> AsyncIterator[Callable[[], None]]:
        """`count` requests are accepted together; call what this yields when one of them begins.

        Raises what `check` does, and Refused in the block when they take too long: 503 while one
        of them waits, 504 after.
        """
        self.check(count)
        clock = asyncio.get_running_loop()
        joined_s = clock.time()
        limits = self.limits
        last_s = None if limits.request_timeout is None else joined_s + limits.request_timeout
        first_s = joined_s + limits.queue_timeout
        left = count
        self.waiting += count

        def begun() -> None:
            nonlocal left
            left -= 1
            self.waiting -= 1
            self._last_wait_s = clock.time() - joined_s
            if not left and not patience.expired():  # it may have, a moment ago
                patience.reschedule(last_s)

        soonest_s = first_s if last_s is None else min(first_s, last_s)
        try:
            async with asyncio.timeout_at(soonest_s) as patience:
                yield begun
        except TimeoutError:
            if not patience.expired():
                raise
            if patience.when() == first_s:
                raise queue_timeout(limits.queue_timeout, self.retry_after_s) from None
            raise past_deadline(limits.request_timeout) from None
        finally:
            self.waiting -= left
