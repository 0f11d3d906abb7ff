"""Errors that forge raises on purpose.

Owns the tree and the wording rule: what is wrong, the limit, the remedy. Knows no other module.
A broken invariant is not here: it is an assert with its numbers, and it crashes.

    ForgeError
    ├── InvalidRequest        a field of a request cannot be served; names the field
    │   ├── ContextTooLong    prompt or prompt + max_tokens over the longest sequence
    │   ├── NeverFits         the cache could not hold the request even if it ran alone
    │   └── DuplicateRequest  the id belongs to a live request
    ├── InvalidConfig         an option cannot be honoured; the command line exits with 2
    ├── InvalidWeights        a tensor does not match the model's; no weight has changed
    ├── EnginePaused          the engine is paused or sleeps, and a command needs it to run
    ├── EngineBusy            a call of LLM within another one, as from a handler of a signal
    ├── CacheError            a refused cache operation; the cache is unchanged
    │   ├── OutOfBlocks
    │   ├── UnknownSequence
    │   ├── DuplicateSequence
    │   └── BlocksInUse
    ├── DamagedBlocks         blocks are not as they were stored in host memory; the step is void
    ├── PolicyError           a user's policy returned an answer that cannot be carried out
    ├── RequestFailed         the engine gave up on one request; others continue
    └── EngineDead            the engine loop has ended and serves no more requests
        ├── RankMismatch      with check_ranks: a rank has made another plan than rank 0
        └── EngineClosed      it was closed on purpose
"""

from __future__ import annotations


class ForgeError(Exception):
    """An error that a user can act on. The message is one line. It can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own pickling calls __init__ with `args`, and subclasses take other arguments.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(error_class: type[ForgeError], args: tuple[object, ...]) -> ForgeError:
    return error_class.__new__(error_class, *args)


class InvalidRequest(ForgeError, ValueError):
    """`field` of a request cannot be served; `code` names the kind of refusal over HTTP."""

    code = "invalid_value"

    def __init__(self, field: str, problem: str, remedy: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy
        if code is not None:
            self.code = code


class ContextTooLong(InvalidRequest):
    """The request needs more positions than the longest sequence this engine keeps."""

    code = "context_length_exceeded"


class NeverFits(InvalidRequest):
    """The request needs more blocks than the whole pool has, so it could never finish."""

    code = "context_length_exceeded"


class DuplicateRequest(InvalidRequest):
    """The id belongs to a request that has not ended."""

    code = "duplicate_request"


class InvalidConfig(ForgeError, ValueError):
    """`option` cannot be honoured as given."""

    def __init__(self, option: str, problem: str, remedy: str) -> None:
        super().__init__(f"{option}: {problem}. {remedy}")
        self.option = option


class InvalidWeights(ForgeError, ValueError):
    """The tensor `name` of an update does not match the model's. No weight has changed."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"{name}: {problem}. {remedy}")
        self.name = name


class EnginePaused(ForgeError):
    """The engine is paused, or its model sleeps; the message names the command that comes first."""


class EngineBusy(ForgeError):
    """The engine is in a call of this thread, within which no other can run."""


class CacheError(ForgeError):
    """A cache operation was refused and changed nothing."""


def describe_need(num_blocks: int) -> str:
    """Return "1 block needed", or "blocks" for another number."""
    return f"{num_blocks} block{'' if num_blocks == 1 else 's'} needed"


class OutOfBlocks(CacheError):
    """`needed` blocks were requested and `free` are free."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"{describe_need(needed)}, {free} free. Release a sequence, then try again"
        )
        self.needed = needed
        self.free = free


class UnknownSequence(CacheError):
    """The sequence id has no block table."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(f"sequence {seq_id} has no block table. Open it first")
        self.seq_id = seq_id


class DuplicateSequence(CacheError):
    """The sequence id already has a block table."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(f"sequence {seq_id} already has a block table. Release it first")
        self.seq_id = seq_id


class BlocksInUse(CacheError):
    """The pool cannot shrink: block tables still refer to the blocks that would go."""

    def __init__(self, num_blocks: int, in_use: int) -> None:
        super().__init__(
            f"cannot shrink to {num_blocks} blocks: {in_use} blocks past that are in use. "
            "Release their sequences first"
        )
        self.in_use = in_use


class DamagedBlocks(ForgeError):
    """Blocks that step `step` has loaded differ from what was stored in the host blocks.

    pairs   block and host block of each
    """

    def __init__(self, step: int, pairs: list[tuple[int, int]]) -> None:
        names = ", ".join(f"block {block} from host block {host}" for block, host in pairs[:8])
        more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
        super().__init__(
            f"step {step} has loaded content that was not stored: {names}{more}. Nothing of the "
            "step is used, and the tokens are computed again. If it is reported again, test the "
            "memory of the machine, or start without kv_host_gib"
        )
        self.step = step
        self.pairs = pairs


class PolicyError(ForgeError):
    """A policy returned a choice that was not offered, or left the engine nothing to do."""


class RequestFailed(ForgeError):
    """A request ended in an error; the message has the cause. Other requests continue."""


class EngineDead(ForgeError):
    """The engine loop has ended; the message has the reason."""


class RankMismatch(EngineDead):
    """A rank has made another plan than rank 0 from the same inputs."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"this rank has made {difference}. The ranks run different versions or a policy that "
            "depends on more than its arguments: run the same files, and fix the policy"
        )


class EngineClosed(EngineDead):
    """The engine was closed and has not failed."""


def one_line(error: BaseException) -> str:
    """Return the message of a library's error as one line of at most 160 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
