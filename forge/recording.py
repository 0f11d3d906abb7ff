"""Recording: a run of an engine as a file, complete enough to make every decision again.

Owns the format, both ways. Knows no clock but the one it is given, and no model: a recording has
what crossed the seam and what came from outside.

    crc32 {"forge": ..., "config": {...}, ...}          what the engine was built with
    crc32 {"submit": {"id": 7, "prompt": [...], ...}}   from outside, between two steps
    crc32 {"abort": 7}                                  also "resize", "end_session", "pause", ...
    crc32 {"plan": [3, digest, ns], "cuts": [...]}      planned; digest of all that was decided
    crc32 {"done": [2, ns], "out": [17, 4, [], ...], "ended": [...]}
                                                        committed: tokens of each row, and which
                                                        texts were complete without an end id
                                                        "answers": files written and read
    crc32 {"end": 120}                                  lines before this one: nothing is missing

Each crc32 covers all lines before it too, so the first damaged line is found.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, TypeVar
from zlib import crc32

from forge.config import (
    DiskTier,
    EngineConfig,
    HostTier,
    LoadCosts,
    MixedStepCosts,
    Speculation,
    StepCosts,
)
from forge.errors import InvalidConfig
from forge.pause import PauseMode
from forge.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Structure,
    ThinkingBudget,
)
from forge.seam import RowOutput, StepOutput, StepPlan, Verified
from forge.sessions import SessionKey

Entry = dict[str, Any]

CostsT = TypeVar("CostsT", StepCosts, MixedStepCosts, LoadCosts)

_NUMERIC_FIELDS = ("seq_id", "epoch", "slot", "start", "keep", "num_samples")
"""Fields of a Row that are integers, in the order in which they are hashed."""


def plan_digest(plan: StepPlan) -> int:
    """Return 32 bits of everything that a plan decides. Some 50 us for 256 rows."""
    rows = plan.rows
    numbers = array("q", (plan.step, plan.num_blocks, len(rows), len(plan.drafts)))
    for field in _NUMERIC_FIELDS:
        numbers.extend(map(attrgetter(field), rows))
    crc = crc32(numbers.tobytes())
    blocks = [row.new_blocks for row in rows if row.new_blocks]
    if blocks:
        crc = crc32(repr(blocks).encode(), crc)
    chunk_lens = [len(row.tokens) for row in rows if len(row.tokens) > 1]
    drafts = [row.drafts for row in rows if row.drafts]
    decisions = (chunk_lens, drafts, plan.copies, plan.admitted, plan.preempted, plan.finished)
    if any(decisions):
        crc = crc32(repr(decisions).encode(), crc)
    if plan.num_host_blocks or plan.stores or plan.loads:
        moves = (plan.num_host_blocks, plan.stores, plan.loads)
        crc = crc32(repr(moves).encode(), crc)
    if plan.spills or plan.fetches or plan.file_epoch:
        files = (plan.spills, plan.fetches, plan.file_epoch)
        crc = crc32(repr(files).encode(), crc)
    if plan.late_rows or plan.late_masks:
        late = (plan.late_rows, [row for row, _ in plan.late_masks])
        crc = crc32(repr(late).encode(), crc)
    for draft in plan.drafts:
        crc = crc32(plan_digest(draft).to_bytes(4, "little"), crc)
    return crc


class RecordingWriter:
    """Recorder that writes a file. One thread calls it.

    write   takes text; the caller closes the file
    clock   integer nanoseconds
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], int], header: Entry
    ) -> None:
        self._write = write
        self._clock = clock
        self._crc = self._num_lines = 0
        self._write_line(header)

    def record_submit(self, request: Request) -> None:
        """Write the request."""
        self._write_line({"submit": encode_request(request)})

    def record_abort(self, request_id: int) -> None:
        """Write the abort."""
        self._write_line({"abort": request_id})

    def record_reset(self) -> None:
        """Write that the prefix cache was reset."""
        self._write_line({"reset": True})

    def record_pause(self, mode: PauseMode) -> None:
        """Write the pause."""
        self._write_line({"pause": mode.value})

    def record_resume(self) -> None:
        """Write the end of the pause."""
        self._write_line({"resume": True})

    def record_weights(self, version: str, namespace: str) -> None:
        """Write the version of new weights, and the namespace of later blocks."""
        self._write_line({"weights": [version, namespace]})

    def record_sleep(self, level: int) -> None:
        """Write that the model has released its memory."""
        self._write_line({"sleep": level})

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Write the new sizes of the pools."""
        self._write_line({"resize": [num_blocks, num_host_blocks]})

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Write the keys of the files that were there at the start."""
        self._write_line({"disk_keys": [key.hex() for key in keys]})

    def record_end_session(self, key: SessionKey) -> None:
        """Write that a client ended the session."""
        self._write_line({"end_session": key})

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Write that the session expired after the turn of that number."""
        self._write_line({"expire_session": [*key, last_turn]})

    def record_plan(self, plan: StepPlan | None) -> None:
        """Write the plan's digest and time, or that there was no plan."""
        if plan is None:
            self._write_line({"plan": None})
            return
        entry: Entry = {"plan": [plan.step, plan_digest(plan), self._clock()]}
        num_masked_drafts = [
            [row.seq_id, len(row.drafts)] for row in plan.rows if row.masks and row.drafts
        ]
        if num_masked_drafts:
            entry["cuts"] = num_masked_drafts
        self._write_line(entry)

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Write the output's tokens, and the ends that no token implies."""
        entry: Entry = {
            "done": [output.step, self._clock()],
            "out": [
                out.tokens[0]
                if len(out.tokens) == 1 and not out.verified
                else _encode_row_output(out)
                for out in output.rows
            ],
        }
        endings = [_encode_ending(delta) for delta in deltas if delta.finish is not None]
        if any(endings):
            entry["ended"] = [each for each in endings if each]
        if output.undrafted:
            entry["undrafted"] = output.undrafted
        if output.answers:
            entry["answers"] = output.answers
        self._write_line(entry)

    def record_void(self, why: str) -> None:
        """Write that every plan in flight is void, and why."""
        self._write_line({"void": why})

    def close(self) -> None:
        """Write the last line."""
        self._write_line({"end": self._num_lines})

    def _write_line(self, entry: Entry) -> None:
        text = json.dumps(entry, separators=(",", ":"))
        self._crc = crc32(text.encode(), self._crc)
        self._num_lines += 1
        self._write(f"{self._crc:08x} {text}\n")


def _encode_row_output(out: RowOutput) -> list[int] | Entry:
    if out.error is not None:
        return {"error": out.error}
    if out.verified:
        return {"tokens": out.tokens, "judged": len(out.verified)}
    return list(out.tokens)


def _encode_ending(delta: Delta) -> list[Any] | None:
    """Return an end that no token implies, or None: a complete text, or an error."""
    if delta.finish is FinishReason.STOP and delta.stop_token is None:
        return [delta.request_id, delta.choice, len(delta.tokens), None]
    if delta.finish is FinishReason.ERROR:
        return [delta.request_id, delta.choice, 0, delta.error]
    return None


def parse_row_output(entry: int | list[int] | Entry) -> RowOutput:
    """Return the result of a row from its entry."""
    if isinstance(entry, int):
        return RowOutput((entry,))
    if isinstance(entry, list):
        return RowOutput(tuple(entry))
    if "error" in entry:
        return RowOutput(error=entry["error"])
    verified = tuple(Verified(token) for token in [*entry["tokens"], 0][: entry["judged"]])
    return RowOutput(tuple(entry["tokens"]), verified=verified)


def build_header(
    config: EngineConfig, vocab_size: int, eos_token: int, policy: str, version: str
) -> Entry:
    """Return the first line: all that decisions depend on besides the later lines."""
    numbers = asdict(config)
    if config.host_tier is None:
        del numbers["host_tier"]
    return {
        "forge": version,
        "policy": policy,
        "vocab_size": vocab_size,
        "eos_token": eos_token,
        "config": numbers,
    }


def parse_config(entry: Entry) -> EngineConfig:
    """Return the configuration of a header. Raises InvalidConfig for one of another version."""
    values = dict(entry["config"])
    values["end_ids"] = tuple(values["end_ids"])
    values.setdefault("max_sessions", 0)  # a recording from before there were sessions
    mixed_costs = values.pop("mixed_costs", None)  # a recording from before steps were bounded
    if mixed_costs is not None:
        values["mixed_costs"] = _parse_costs(_parse_mixed_costs, mixed_costs)
    speculation = values.pop("speculation")
    if speculation is not None:
        speculation = dict(speculation)
        costs = speculation.pop("costs")
        if costs is not None:
            costs = _parse_costs(_parse_step_costs, costs)
        speculation = Speculation(**speculation, costs=costs)
    host_tier = values.pop("host_tier", None)
    if host_tier is not None:
        costs = host_tier["costs"]
        costs = None if costs is None else _parse_costs(_parse_load_costs, costs)
        disk = host_tier["disk"]
        disk = None if disk is None else DiskTier(**disk)
        host_tier = HostTier(**{**host_tier, "costs": costs, "disk": disk})
    return EngineConfig(**values, speculation=speculation, host_tier=host_tier)


def _parse_costs(parse: Callable[[Any], CostsT], costs: Any) -> CostsT:
    """Return the parsed costs. Raises InvalidConfig for those of another version."""
    try:
        return parse(costs)
    except (TypeError, ValueError):
        raise InvalidConfig(
            "recording",
            "its costs are written as another version has them",
            "Replay it with the version that recorded it",
        ) from None


def _parse_step_costs(costs: list[list[list[Any]]]) -> StepCosts:
    return StepCosts._make(map(_parse_points, costs))


def _parse_mixed_costs(costs: list[Any]) -> MixedStepCosts:
    points, position_ns, pair_ps = costs
    return MixedStepCosts(tuple((tokens, us) for tokens, us in points), position_ns, pair_ps)


def _parse_load_costs(costs: list[Any]) -> LoadCosts:
    return LoadCosts(*costs)


def _parse_points(pairs: list[list[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((tokens, seconds) for tokens, seconds in pairs)


def encode_request(request: Request) -> Entry:
    """Return the request as JSON. Parameters at their default are left out."""
    params: Entry = {}
    for each in fields(SamplingParams):
        value = getattr(request.params, each.name)
        if value != each.default:
            params[each.name] = value
    if request.params.structure is not None:
        params["structure"] = request.params.structure.encode()
    if request.params.thinking_budget is not None:
        params["thinking_budget"] = request.params.thinking_budget.encode()
    entry: Entry = {"id": request.id, "prompt": list(request.prompt), "params": params}
    names = ("priority", "cache_salt", "arrival_s", "tenant", "session_id", "session_end")
    for name in (*names, "external_id", "begins_text"):
        if getattr(request, name):
            entry[name] = getattr(request, name)
    if request.expected_pause_s is not None:  # 0 is a pause too
        entry["expected_pause_s"] = request.expected_pause_s
    return entry


def parse_request(entry: Entry) -> Request:
    """Return the request of an entry."""
    values = dict(entry)
    params = dict(values.pop("params"))
    if "structure" in params:
        params["structure"] = Structure.decode(params["structure"])
    if "thinking_budget" in params:
        params["thinking_budget"] = ThinkingBudget.decode(params["thinking_budget"])
    names = ("logit_bias", "allowed_token_ids", "stop", "stop_token_ids", "logprob_token_ids")
    for name in names:
        if name in params:
            params[name] = tuple(
                tuple(each) if isinstance(each, list) else each for each in params[name]
            )
    prompt = tuple(values.pop("prompt"))
    return Request(prompt=prompt, params=SamplingParams(**params), **values)


def read_entries(lines: Iterable[str]) -> Iterator[tuple[int, Entry]]:
    """Yield line numbers, from 1, and entries. Raises InvalidConfig at the first damaged line.

    A last line that ends in the middle is none: the disk was full, or the engine was killed.
    """
    crc = 0
    number = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n") and number > 1:
            return
        written_crc, _, text = line.rstrip("\n").partition(" ")
        crc = crc32(text.encode(), crc)
        if written_crc != f"{crc:08x}" or not line.endswith("\n"):
            raise InvalidConfig(
                "recording", f"line {number} is not as it was written", "Record the run again"
            )
        yield number, json.loads(text)
    if not number:
        raise InvalidConfig("recording", "it is empty", "Record a run with --record FILE")
