"""Replay: a recorded run decided again, on any machine, and the first decision that differs.

Owns the comparison, and what a recording says of its requests. Knows no model: outputs are the
recorded ones, so the real scheduler meets what it met then. No clock is needed, for nothing is
decided by one.

    recording ──► submit, abort ──► Scheduler.schedule() ──► digest ──► as recorded?
                  outputs ────────► Scheduler.commit()                  no: line, step, both
                                      └──► who asked for what and when, and what it was given
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from forge.drafting import drafting_of
from forge.errors import ForgeError, InvalidConfig
from forge.llm import find_policy
from forge.policy import Policy
from forge.recording import Entry, config_of, digest, entries, request_of, row_output
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import StepOutput, StepPlan
from forge.sequence import BY_STOP, BY_STRUCTURE


class Replayed(NamedTuple):
    """What came of it.

    difference   None, or the first decision that is not the recorded one
    whole        the recording has its last line: nothing is missing
    """

    version: str
    steps: int
    requests: int
    tokens: int
    lines: int
    difference: str | None
    whole: bool


class Served(NamedTuple):
    """A request of a recording, and what came of it. Times are those of the recorded steps.

    came_ns   of the first plan after it was submitted
    left_ns   of the first plan after it was aborted; None: it ended by itself
    gained    tokens of each choice
    """

    request: Request
    came_ns: int
    left_ns: int | None
    gained: tuple[int, ...]


class _Failure(Exception):
    """A failure in the words of the recorded one."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


class _Told:
    """A watch or a guide that says what the recording says of its output."""

    mask = b""

    def __init__(self, replay: _Replay, request_id: int, choice: int, name: str) -> None:
        self._replay = replay
        self._key = (request_id, choice)
        self._name = name

    def feed(self, token: int) -> bool:
        """True with the token with which the output was complete. Raises what it raised then."""
        ending = self._replay.ended.get(self._key)
        if ending is None:
            return False
        tokens, error = ending
        if error is not None:
            if error.startswith(f"{self._name}: "):
                raise _Failure(error.partition(": ")[2])
            return False
        self._replay.ended[self._key] = (tokens - 1, None)
        return tokens == 1

    def ahead(self, drafts: Iterable[int]) -> list[bytes]:
        """As many masks as the recorded row had drafts."""
        return [b""] * self._replay.cuts.get(self._replay.sequence_of[self._key], 0)


class _Replay:
    """The scheduler, and what the line being replayed says beside tokens.

    ended    (request, choice): tokens left until its text is complete, or how it failed
    cuts     drafts that a structure allowed, by sequence
    deltas   what the line gave
    """

    def __init__(self, header: Entry, policy: str | Policy | None) -> None:
        config = config_of(header)
        self.ended: dict[tuple[int, int], tuple[int, str | None]] = {}
        self.cuts: dict[int, int] = {}
        self.sequence_of: dict[tuple[int, int], int] = {}
        self.requests = self.steps = self.tokens = 0
        self.deltas: list[Delta] = []
        self._adding: Iterator[_Told] = iter(())
        self.scheduler = Scheduler(
            config,
            header["vocab_size"],
            (header["eos_token"], *config.end_ids),
            find_policy(policy or header["policy"]),
            self._watch,
            self._guide,
            drafting_of(config, None),
        )
        self._request_id = self._choice = 0

    def _watch(self, params: SamplingParams) -> _Told | None:
        self._choice += 1  # asked first, once for each choice
        if not params.stop or params.structure is not None:
            return None
        return _Told(self, self._request_id, self._choice, BY_STOP)

    def _guide(self, params: SamplingParams) -> _Told | None:
        if params.structure is None:
            return None
        return _Told(self, self._request_id, self._choice, BY_STRUCTURE)

    def obey(self, entry: Entry) -> str | None:
        """The line is replayed; what differs, if anything does."""
        self.deltas = []
        if "submit" in entry:
            self._submit(entry["submit"])
        elif "abort" in entry:
            self.deltas = self.scheduler.abort(entry["abort"])
        elif "reset" in entry:
            self.scheduler.reset_prefix_cache()
        elif "void" in entry:
            self.deltas = self.scheduler.void(entry["void"])
        elif "plan" in entry:
            return self._plan(entry)
        elif "done" in entry:
            return self._commit(entry)
        return None

    def _submit(self, written: Entry) -> None:
        request = request_of(written)
        self._request_id, self._choice = request.id, -1
        self.scheduler.add(request)
        self.requests += 1
        for sequence in self.scheduler.requests[request.id]:
            self.sequence_of[request.id, sequence.choice] = sequence.id

    def _plan(self, entry: Entry) -> str | None:
        self.cuts = dict(map(tuple, entry.get("cuts", ())))
        plan, said = self.scheduler.schedule(), entry["plan"]
        if plan is None or said is None:
            return None if plan is said else f"{_shown(plan)}, and {said} was recorded"
        step, known, _ = said
        if (plan.step, digest(plan)) != (step, known):
            return f"another plan than the recorded step {step}: {_shown(plan)}"
        self.steps += 1
        return None

    def _commit(self, entry: Entry) -> str | None:
        step, rows = entry["done"][0], tuple(map(row_output, entry["out"]))
        ledger = self.scheduler.ledger
        if not ledger or (ledger[0].step, len(ledger[0].rows)) != (step, len(rows)):
            return f"step {step} with {len(rows)} rows was committed, and {_shown(ledger)} is due"
        self.ended = {(r, c): (n, error) for r, c, n, error in entry.get("ended", ())}
        output = StepOutput(step, rows, tuple(entry.get("undrafted", ())))
        self.deltas = self.scheduler.commit(ledger[0], output)
        for delta in self.deltas:
            self.tokens += len(delta.tokens)
            if delta.finish is not None:
                self.sequence_of.pop((delta.request_id, delta.choice), None)
        return None


def _shown(plan: Any) -> str:
    """The plan, as far as one reads in one line."""
    if not isinstance(plan, StepPlan):
        plan = plan[0] if plan else None
    if plan is None:
        return "no plan"
    text = repr(plan)
    return text if len(text) <= 400 else f"{text[:400]}..."


Hear = Callable[[Entry, Sequence[Delta]], object]
"""Told of each line that was decided as it is recorded, and of what it gave."""


def replay(
    lines: Iterable[str],
    policy: str | Policy | None = None,
    hear: Hear = lambda entry, deltas: None,
) -> Replayed:
    """The recording's decisions are made again, up to the first that differs.

    policy   in the place of the recorded one, where that was no name
    Raises InvalidConfig where the recording is damaged, or is none.
    """
    read = entries(lines)
    _, header = next(read)
    if "config" not in header:
        raise InvalidConfig("recording", "line 1 is no header of a recording", "Name another file")
    run = _Replay(header, policy)
    number, difference, whole = 1, None, False
    for number, entry in read:
        if "end" in entry:
            whole = entry["end"] == number - 1
            for after, _ in read:
                what = f"line {after} comes after the end"
                raise InvalidConfig("recording", what, "Name a file of --record")
            break
        try:
            difference = run.obey(entry)
        except (ForgeError, AssertionError, LookupError) as fault:
            difference = f"{fault!r}"
        if difference is not None:
            difference = f"line {number}: {difference}"
            break
        hear(entry, run.deltas)
    return Replayed(header["forge"], run.steps, run.requests, run.tokens, number, difference, whole)


class _History:
    """What is heard of requests, by their place in the order in which they were submitted.

    A submission and an abort have no time of their own: they have the next plan's.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.gained: list[list[int]] = []
        self.came_ns: dict[int, int] = {}
        self.left_ns: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._untimed: list[tuple[dict[int, int], int]] = []
        self._last_ns = 0

    def hear(self, entry: Entry, deltas: Sequence[Delta]) -> None:
        """One more line."""
        if "submit" in entry:
            request = request_of(entry["submit"])
            place = self._places[request.id] = len(self.requests)
            self.requests.append(request)
            self.gained.append([0] * request.params.n)
            self._untimed.append((self.came_ns, place))
        elif entry.get("plan"):
            self._last_ns = entry["plan"][2]
            self.settle()
        for delta in deltas:
            place = self._places[delta.request_id]
            self.gained[place][delta.choice] += len(delta.tokens)
            if delta.finish is FinishReason.ABORT:
                self._untimed.append((self.left_ns, place))

    def settle(self) -> None:
        """Whoever came or left since the last plan did so now."""
        for times, place in self._untimed:
            times[place] = self._last_ns
        self._untimed.clear()


def history(lines: Iterable[str]) -> list[Served]:
    """Every request of a recording, as they were submitted: the run is decided again for it.

    The recording alone does not say whose its tokens are. Raises InvalidConfig where it is damaged,
    has no end, or is decided otherwise.
    """
    told = _History()
    found = replay(lines, hear=told.hear)
    if found.difference is not None:
        raise InvalidConfig(
            "recording",
            f"it is decided otherwise at {found.difference}",
            f"Take forge {found.version}, which recorded it",
        )
    if not found.whole:
        raise InvalidConfig("recording", "its end is missing", "Record the run again")
    told.settle()
    return [
        Served(request, told.came_ns[place], told.left_ns.get(place), tuple(told.gained[place]))
        for place, request in enumerate(told.requests)
    ]
