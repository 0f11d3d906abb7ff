"""ReplayRun: a scheduler that receives recorded inputs, and compares its plans with recorded ones.

Owns the scheduler and the facts of the current line. Knows no model, file or clock: outputs are the
recorded ones, and no decision depends on a clock. So the scheduler receives the same inputs as in
the recorded run, which `forge sim replay` and --check-ranks make use of.

    submit, abort ──► Scheduler.schedule() ──► digest ──► equal to the recorded one?
    outputs ────────► Scheduler.commit()                  no: step, both plans
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forge.drafting import create_drafter
from forge.pause import PauseMode
from forge.policy import Policy
from forge.recording import (
    Entry,
    parse_config,
    parse_request,
    parse_row_output,
    plan_digest,
)
from forge.request import Delta, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import FileAnswer, StepOutput, StepPlan
from forge.sequence import STOP_ERROR_PREFIX, STRUCTURE_ERROR_PREFIX, GrammarMatcher


class _RecordedFailure(Exception):
    """An exception whose repr is the text of the recorded one."""

    def __init__(self, text: str) -> None:
        self._words = text

    def __repr__(self) -> str:
        return self._words


class _RecordedChecker(GrammarMatcher):
    """A stop checker or a grammar matcher that returns the recorded results."""

    mask = b""

    def __init__(self, replay: ReplayRun, request_id: int, choice: int, name: str) -> None:
        self._replay = replay
        self._key = (request_id, choice)
        self._name = name

    def feed(self, token: int) -> bool:
        """Return True for the token that completed the output. Raises the recorded exception."""
        ending = self._replay.endings.get(self._key)
        if ending is None:
            return False
        tokens, error = ending
        self._replay.endings[self._key] = (tokens - 1, error)
        if error is not None:
            if tokens == 1:
                self.check_end()
            return False
        return tokens == 1

    def check_end(self) -> None:
        """Raise the recorded exception."""
        _, error = self._replay.endings.get(self._key, (0, None))
        if error is not None and error.startswith(f"{self._name}: "):
            raise _RecordedFailure(error.partition(": ")[2])

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Return as many masks as the recorded row had drafts."""
        return [b""] * self._replay.num_allowed_drafts.get(self._replay.sequence_of[self._key], 0)


class _RecordedBudget(_RecordedChecker):
    """The matcher of an output with a budget of reasoning alone: it completes no output."""

    def feed(self, token: int) -> bool:
        """Return False. Raises the recorded exception."""
        ending = self._replay.endings.get(self._key)
        if ending is not None and ending[1] is not None:
            return super().feed(token)
        return False


class ReplayRun:
    """The scheduler, and the facts of the current line besides tokens.

    endings              (request, choice) -> tokens until its text is complete or fails, and the
                         error
    num_allowed_drafts   sequence -> drafts that the grammar allowed
    deltas               the result of the current line
    """

    def __init__(self, header: Entry, policy: Policy) -> None:
        config = parse_config(header)
        self.endings: dict[tuple[int, int], tuple[int, str | None]] = {}
        self.num_allowed_drafts: dict[int, int] = {}
        self.sequence_of: dict[tuple[int, int], int] = {}
        self.requests = self.steps = self.tokens = 0
        self.deltas: list[Delta] = []
        self.scheduler = Scheduler(
            config,
            header["vocab_size"],
            (header["eos_token"], *config.end_ids),
            policy,
            self._create_stop_checker,
            self._create_matcher,
            create_drafter(config, None),
        )
        self._request_id = self._choice = 0

    def _create_stop_checker(self, request: Request) -> _RecordedChecker | None:
        self._choice += 1  # the scheduler calls this first, once for each choice
        if not request.params.stop or request.params.structure is not None:
            return None
        return _RecordedChecker(self, self._request_id, self._choice, STOP_ERROR_PREFIX)

    def _create_matcher(self, params: SamplingParams) -> _RecordedChecker | None:
        if not params.has_masks:
            return None
        if params.structure is None:
            return _RecordedBudget(self, self._request_id, self._choice, STRUCTURE_ERROR_PREFIX)
        return _RecordedChecker(self, self._request_id, self._choice, STRUCTURE_ERROR_PREFIX)

    def apply(self, entry: Entry) -> str | None:
        """Replay one line. Returns a text where the result differs from the recorded one."""
        self.deltas = []
        if "submit" in entry:
            self._submit(entry["submit"])
        elif "abort" in entry:
            self.deltas = self.scheduler.abort(entry["abort"])
        elif "end_session" in entry:
            tenant, name = entry["end_session"]
            self.scheduler.end_session((tenant, name))
        elif "expire_session" in entry:
            tenant, name, last_turn = entry["expire_session"]
            self.scheduler.expire_session((tenant, name), last_turn)
        elif "resize" in entry:
            num_blocks, num_host_blocks = entry["resize"]
            if num_blocks is not None:
                self.scheduler.resize(num_blocks)
            if num_host_blocks is not None:
                self.scheduler.resize_host(num_host_blocks)
        elif "disk_keys" in entry:
            self.scheduler.disk_cache.add_keys(map(bytes.fromhex, entry["disk_keys"]))
        elif "reset" in entry:
            self.scheduler.reset_prefix_cache()
        elif "pause" in entry:
            if entry["pause"] != PauseMode.WAIT:
                self.scheduler.freeze()
        elif "resume" in entry:
            self.scheduler.unfreeze()
        elif "weights" in entry:
            version, namespace = entry["weights"]
            self.scheduler.discard_kv(f"weights {version}", namespace)
        elif "sleep" in entry:
            self.scheduler.freeze()
            namespace = self.scheduler.prefix_cache.namespace
            self.scheduler.discard_kv("the model sleeps", namespace)
        elif "void" in entry:
            self.deltas = self.scheduler.void(entry["void"])
        elif "plan" in entry:
            return self._plan(entry)
        elif "done" in entry:
            return self._commit(entry)
        return None

    def _submit(self, fields: Entry) -> None:
        request = parse_request(fields)
        self._request_id, self._choice = request.id, -1
        self.scheduler.add(request)
        self.requests += 1
        for sequence in self.scheduler.requests[request.id]:
            self.sequence_of[request.id, sequence.choice] = sequence.id

    def _plan(self, entry: Entry) -> str | None:
        self.num_allowed_drafts = dict(map(tuple, entry.get("cuts", ())))
        plan, recorded = self.scheduler.schedule(), entry["plan"]
        if plan is None or recorded is None:
            return (
                None if plan is recorded else f"{_describe_plan(plan)}, and {recorded} was recorded"
            )
        step, recorded_digest, _ = recorded
        if (plan.step, plan_digest(plan)) != (step, recorded_digest):
            return f"another plan than the recorded step {step}: {_describe_plan(plan)}"
        self.steps += 1
        return None

    def _commit(self, entry: Entry) -> str | None:
        step, rows = entry["done"][0], tuple(map(parse_row_output, entry["out"]))
        ledger = self.scheduler.ledger
        if not ledger or (ledger[0].step, len(ledger[0].rows)) != (step, len(rows)):
            return (
                f"step {step} with {len(rows)} rows was committed, and {_describe_plan(ledger)} "
                "is due"
            )
        num_tokens = {
            row.seq_id: len(result.tokens) for row, result in zip(ledger[0].rows, rows, strict=True)
        }
        # No draft follows one that completes an output: its last token is the one that failed.
        self.endings = {
            (r, c): (n if error is None else num_tokens.get(self.sequence_of[r, c], 1), error)
            for r, c, n, error in entry.get("ended", ())
        }
        answers = tuple(FileAnswer(*answer) for answer in entry.get("answers", ()))
        output = StepOutput(step, rows, tuple(entry.get("undrafted", ())), answers)
        self.deltas = self.scheduler.commit(ledger[0], output)
        for delta in self.deltas:
            self.tokens += len(delta.tokens)
            if delta.finish is not None:
                self.sequence_of.pop((delta.request_id, delta.choice), None)
        return None


def _describe_plan(plan: Any) -> str:
    """Return the plan as text, cut to one line."""
    if not isinstance(plan, StepPlan):
        plan = plan[0] if plan else None
    if plan is None:
        return "no plan"
    text = repr(plan)
    return text if len(text) <= 400 else f"{text[:400]}..."
