"""Sessions of agents on a running server: completion times, throughput and first tokens by turn.

Owns the names of choices and the printed lines. The sessions are in bench/agent_load.py, the loop
and the figures in bench/session_load.py.

    --agents 64 --sessions 128 ─► AgentLoad ─► AgentSessions ─► SessionClient ─► figures, record
                                                     ▲                │
                                                     └─── answers ◄───┘

Always true: prompts are a function of the options and, with `returned`, of the answers. They do not
depend on the order of events.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from forge.bench.agent_load import AgentLoad
from forge.bench.http_client import Endpoint
from forge.bench.result_file import create_result, write_json
from forge.bench.session_load import (
    AnswerSource,
    FixedAnswers,
    ReturnedAnswers,
    SessionClient,
    session_figures,
)
from forge.bench.workload import PROMPT_ID_RANGE, print_result
from forge.errors import InvalidConfig

COLUMNS = (
    *(("sessions", "sessions", "d"), ("errors", "errors", "d"), ("turns/s", "turns_s", ".2f")),
    *(("session", "session_mean_s", ".1f"), ("p99", "session_p99_s", ".1f")),
    *(("first TTFT", "ttft_first_p50", ".0f"), ("p99", "ttft_first_p99", ".0f")),
    *(("later TTFT", "ttft_later_p50", ".0f"), ("p99", "ttft_later_p99", ".0f")),
    *(("makespan", "makespan_s", ".1f"), ("jain", "jain", ".3f")),
)
"""(heading, key, format) of each printed figure. Sessions and makespan in s, TTFT in ms."""


HINTS: Mapping[str, Callable[[AgentLoad, int], Mapping[str, Any]]] = {
    "none": AgentLoad.no_fields,
    "sessions": AgentLoad.session_fields,
}
"""Name of hints -> (load, request id) -> fields that are sent with it."""

ANSWERS: Mapping[str, Callable[[int], AnswerSource]] = {
    "fixed": lambda vocab_size: FixedAnswers(),
    "returned": ReturnedAnswers,
}
"""Name of a source of answers -> vocabulary size -> the source."""


def find_choice(option: str, name: str, choices: Mapping[str, Any]) -> Any:
    """Return the value of that name. Raises InvalidConfig naming the option."""
    if name not in choices:
        names = " or ".join(choices)
        raise InvalidConfig(option, f"{name[:64]!r} is not known", f"Use {names}")
    return choices[name]


def main(
    url: str,
    json_path: str | None,
    load: AgentLoad,
    hints: str = "none",
    answers: str = "fixed",
    label: str = "forge",
    model: str | None = None,
    vocab_size: int | None = None,
    api_key: str | None = None,
) -> int:
    """Run the sessions, print the figures and write the record. Returns 1 if a turn failed.

    label        name of the engine in results
    vocab_size   bound of the ids of prompts; None: PROMPT_ID_RANGE
    json_path    file of the record, or None
    Raises InvalidConfig where no server answers.
    """
    vocab_size = vocab_size or PROMPT_ID_RANGE[1]
    source: AnswerSource = find_choice("answers", answers, ANSWERS)(vocab_size)
    fields: Callable[[AgentLoad, int], Mapping[str, Any]] = find_choice("hints", hints, HINTS)
    server = Endpoint(url, model, api_key)
    load = replace(load, max_len=server.fetch_max_model_len())
    workload = load.create_workload(source.get_answer)
    client = SessionClient(
        server, workload, source, vocab_size, load.turn_of, partial(fields, load)
    )
    run = asyncio.run(client.run())
    about = {"engine": label, "shape": os.path.basename(server.model.rstrip("/")), "path": "http"}
    result = {**about, "hints": hints, "answers": answers, **session_figures(run)}
    show(result)
    if json_path is not None:
        figures = {"workload": asdict(load), "result": result, "errors": run.errors}
        write_json(json_path, create_result("agents", figures))
    for session, why in list(run.errors.items())[:3]:
        print(f"session {session}, {why}")
    return 1 if run.errors else 0


def show(result: Mapping[str, Any]) -> None:
    """Print a table of one row, then the result as a line for programs."""
    print("".join(f"{name:>{max(8, len(name) + 2)}}" for name, _, _ in COLUMNS))
    cells = ["-" if result[key] is None else format(result[key], form) for _, key, form in COLUMNS]
    heads = [name for name, _, _ in COLUMNS]
    print(
        "".join(f"{cell:>{max(8, len(name) + 2)}}" for cell, name in zip(cells, heads, strict=True))
    )
    print_result(result)
