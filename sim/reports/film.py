"""Films of simulations and of replays: FilmRecorder on a virtual clock, or on recorded times.

Owns where a film's times come from. Knows no format and no page: those are in forge.film.

    World ──arrival, refusal──► WorldFilm ◄──plans, commits── Engine      times of the virtual clock
    recording ──► replay ──► ReplayFilm                                   times of the recorded run

A recording has no time of a submission: it has that of the plan or commit after it. Times of a
replay begin with the first plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.engine import Engine
from forge.film.recorder import DeviceSpan, FilmRecorder, film_header
from forge.film.state import Line
from forge.pause import PauseMode
from forge.recording import Entry, parse_request, parse_row_output
from forge.request import Delta, Request
from forge.scheduler import Scheduler
from forge.seam import FileAnswer, StepOutput, StepPlan
from forge.sim.clock import VirtualClockModel, VirtualClockStep
from forge.sim.workloads.workload import RequestArrival


class WorldFilm(FilmRecorder):
    """The Recorder of a world's engine, and its WorldObserver. `lines` is the film."""

    def __init__(self, engine: Engine, title: str, policy: str) -> None:
        model = engine.model
        assert isinstance(model, VirtualClockModel), f"{model} has no virtual clock"
        self.lines: list[Line] = []
        self._model = model
        self._launched_ns: dict[int, int] = {}
        super().__init__(
            self.lines.append,
            engine.scheduler,
            lambda: model.clock.now_ns,
            film_header(engine.scheduler, title, policy, "virtual"),
            self._last_span,
        )
        engine.recorder = self

    def record_submit(self, request: Request) -> None:
        """Do nothing: `on_arrival` follows, with the time at which the request arrived."""

    def record_plan(self, plan: StepPlan | None) -> None:
        """Write the plan, and keep when its launch ends."""
        if plan is not None:
            cost_ns = self._model.cost.plan_ns(plan)
            self._launched_ns[plan.step] = self._model.clock.now_ns + cost_ns
        super().record_plan(plan)

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Write the arrival or the refusal of a request."""
        if refusal is None:
            self.record_arrival(arrival.request, arrival.at_ns)
        else:
            self.record_refusal(arrival.request, arrival.at_ns, refusal)

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Do nothing: the engine reports the abort."""

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Do nothing: the engine reports plan and commit."""

    def _last_span(self) -> DeviceSpan | None:
        step = self._model.last_step
        if step is None:
            return None
        launched_ns = self._launched_ns.pop(step.plan.step)
        return DeviceSpan(launched_ns, step.begin_ns, step.end_ns)


class ReplayFilm:
    """Film of a replay. `lines` is the film, once `close` was called.

    on_start   receives the scheduler and the header of the recording
    on_entry   receives each line that replayed as recorded, and its deltas
    """

    def __init__(self, title: str) -> None:
        self.lines: list[Line] = []
        self.title = title
        self._begin_ns: int | None = None
        self._now_ns = 0
        self._undated: list[Line] = []
        self._recorder: FilmRecorder | None = None

    def on_start(self, scheduler: Scheduler, header: Entry) -> None:
        """Begin the film."""
        film = film_header(scheduler, self.title, header["policy"], "host")
        self._scheduler = scheduler
        self._recorder = FilmRecorder(self._write, scheduler, lambda: self._now_ns, film)

    def on_entry(self, entry: Entry, deltas: Sequence[Delta]) -> None:
        """Film one line of the recording."""
        recorder = self._recorder
        assert recorder is not None, "a replay begins before its first line"
        timed = entry.get("plan") or entry.get("done")
        if timed:
            if self._begin_ns is None:
                self._begin_ns = timed[-1]
            self._now_ns = timed[-1] - self._begin_ns
            self._date_lines()
        if "submit" in entry:
            recorder.record_submit(parse_request(entry["submit"]))
        elif "abort" in entry:
            recorder.record_abort(entry["abort"])
        elif "resize" in entry:
            recorder.record_resize(*entry["resize"])
        elif "reset" in entry:
            recorder.record_reset()
        elif "pause" in entry:
            recorder.record_pause(PauseMode(entry["pause"]))
        elif "resume" in entry:
            recorder.record_resume()
        elif "weights" in entry:
            recorder.record_weights(*entry["weights"])
        elif "sleep" in entry:
            recorder.record_sleep(entry["sleep"])
        elif "disk_keys" in entry:
            recorder.record_disk_keys([bytes.fromhex(key) for key in entry["disk_keys"]])
        elif "end_session" in entry:
            recorder.record_end_session(tuple(entry["end_session"]))
        elif "expire_session" in entry:
            *key, last_turn = entry["expire_session"]
            recorder.record_expire_session(tuple(key), last_turn)
        elif "void" in entry:
            recorder.record_void(entry["void"])
        elif entry.get("plan"):
            recorder.record_plan(self._scheduler.ledger[-1])
        elif "done" in entry:
            rows = tuple(map(parse_row_output, entry["out"]))
            answers = tuple(FileAnswer(*answer) for answer in entry.get("answers", ()))
            undrafted = tuple(entry.get("undrafted", ()))
            recorder.record_commit(StepOutput(entry["done"][0], rows, undrafted, answers), deltas)

    def close(self) -> list[Line]:
        """Return the film."""
        self._date_lines()
        return self.lines

    def _write(self, line: Line) -> None:
        self.lines.append(line)
        if "at" in line and not ("plan" in line or "done" in line):
            self._undated.append(line)

    def _date_lines(self) -> None:
        """Set the time of lines that the recording has without one."""
        for line in self._undated:
            line["at"] = self._now_ns // 1000
        self._undated.clear()
