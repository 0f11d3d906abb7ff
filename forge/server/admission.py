"""AdmissionQueue: how many requests may wait for their first token, and how long.

Owns the count of waiting requests. Knows no scheduler: a request waits from its acceptance until
its first delta is read. So the count is also exact between two steps, and is never below the
engine's own. A preempted request had its first token and does not count again.

    accepted ──► waiting ──────────────► started ───────► ended
                 at most max_queue       the first delta
                 queue_timeout ──► 503
    one more ──► 429 queue_full          request_timeout, of all of it ──► 504

Always true: at most max_queue requests wait, and responses in progress have at most
MAX_HELD_LOGPROBS log probabilities.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from forge.async_llm import AsyncLLM
from forge.errors import InvalidRequest
from forge.grammar_sandbox import GrammarSandbox, SandboxDied, SandboxFull
from forge.limits import DEFAULT_LIMITS, Limits
from forge.request import SamplingParams
from forge.server.errors import (
    deadline_exceeded_error,
    logprobs_full_error,
    queue_full_error,
    queue_timeout_error,
    sandbox_died_error,
    sandbox_full_error,
)

MAX_RETRY_AFTER_S = 60
MAX_HELD_LOGPROBS = 2**24
"""Most log probabilities of the responses in progress, together: some 12 GB of memory."""


class AdmissionQueue:
    """Requests on their way to one engine.

    num_waiting   requests that are accepted and have no token yet
    """

    def __init__(self, llm: AsyncLLM, limits: Limits = DEFAULT_LIMITS) -> None:
        self.llm = llm
        self.limits = limits
        self.num_waiting = 0
        self._sandbox = GrammarSandbox(lambda: llm.engine.grammar_backend.vocabulary())
        self._num_compiling = 0
        self._num_held_logprobs = 0
        self._last_queue_time_s = 0.0

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a retry makes sense: the latest started request waited that long."""
        return min(max(1, math.ceil(self._last_queue_time_s)), MAX_RETRY_AFTER_S)

    def close(self) -> None:
        """End the process that compiles structures. May take some seconds: call it in a thread."""
        self._sandbox.close()

    def check_capacity(self, num_requests: int) -> None:
        """Raise APIError unless `num_requests` more may wait now.

        Raises InvalidRequest if so many could never wait.
        """
        max_queue = self.limits.max_queue
        if num_requests > max_queue:
            raise InvalidRequest(
                "prompt",
                f"{num_requests} prompts, at most {max_queue} may wait",
                "Send fewer at a time",
                "too_many_prompts",
            )
        if self.num_waiting + num_requests > max_queue:
            raise queue_full_error(max_queue, self.retry_after_s)

    async def check_structure(self, params: SamplingParams) -> None:
        """Raise InvalidRequest unless the output's structure, if it has one, can be compiled.

        Separate processes compile it, within limits. Raises APIError after `queue_timeout`, and
        where too many structures wait.
        """
        if params.structure is None:
            return
        structure = params.structure._replace(reasoning=None)  # which costs nothing to compile
        if self.llm.engine.grammar_backend.compilable_level(structure) is not None:
            return
        if self._num_compiling >= self.limits.max_queue:
            raise queue_full_error(self.limits.max_queue, self.retry_after_s)
        self._num_compiling += 1
        try:
            async with asyncio.timeout(self.limits.queue_timeout):
                level = await asyncio.wrap_future(self._sandbox.check(structure))
        except TimeoutError:
            raise queue_timeout_error(self.limits.queue_timeout, self.retry_after_s) from None
        except SandboxFull as error:
            raise sandbox_full_error(str(error), self.retry_after_s) from None
        except SandboxDied as error:
            raise sandbox_died_error(str(error)) from None
        finally:
            self._num_compiling -= 1
        self.llm.engine.grammar_backend.mark_compilable(structure, level)

    @contextmanager
    def admit_logprobs(self, count: int) -> Iterator[None]:
        """Count the log probabilities of a response for the block.

        count   0 where each token has few. Raises APIError where there are too many at this time
        """
        if count and self._num_held_logprobs + count > MAX_HELD_LOGPROBS:
            raise logprobs_full_error(count, MAX_HELD_LOGPROBS, self.retry_after_s)
        with self.count_logprobs_in_progress(count):
            yield

    @contextmanager
    def count_logprobs_in_progress(self, count: int) -> Iterator[None]:
        """Count the log probabilities of a response that `admit_logprobs` has accepted."""
        self._num_held_logprobs += count
        try:
            yield
        finally:
            self._num_held_logprobs -= count

    @asynccontextmanager
    async def enter(self, num_requests: int) -> AsyncIterator[Callable[[], None]]:
        """Admit requests together for the block; yield a function to call at each first token.

        Raises what `check_capacity` raises. Raises APIError in the block when they take too long:
        503 while one of them waits for its first token, 504 after that.
        """
        self.check_capacity(num_requests)
        loop = asyncio.get_running_loop()
        entered_s = loop.time()
        limits = self.limits
        deadline_s = None if limits.request_timeout is None else entered_s + limits.request_timeout
        first_token_deadline_s = entered_s + limits.queue_timeout
        num_left = num_requests
        self.num_waiting += num_requests

        def on_first_token() -> None:
            nonlocal num_left
            num_left -= 1
            self.num_waiting -= 1
            self._last_queue_time_s = loop.time() - entered_s
            if not num_left and not timeout.expired():  # it may expire just before its first token
                timeout.reschedule(deadline_s)

        next_deadline_s = (
            first_token_deadline_s
            if deadline_s is None
            else min(first_token_deadline_s, deadline_s)
        )
        try:
            async with asyncio.timeout_at(next_deadline_s) as timeout:
                yield on_first_token
        except TimeoutError:
            if not timeout.expired():
                raise
            if timeout.when() == first_token_deadline_s:
                raise queue_timeout_error(limits.queue_timeout, self.retry_after_s) from None
            raise deadline_exceeded_error(limits.request_timeout) from None
        finally:
            self.num_waiting -= num_left
