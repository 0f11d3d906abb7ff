"""Traffic cells: workloads like those of real clients, as data.

Owns the `traffic` part of cells.json and its checks. Knows no engine and draws nothing:
bench/traffic_requests.py.

    cells.json ─► Traffic ─► Cell ─┬─ Batch           all requests at once
                                   ├─ TraceBatch      the same, with the lengths of a trace
                                   ├─ Conversations   turns after one shared prefix
                                   └─ OpenLoop        arrivals and lengths of a trace

Always true: forge accepts the parameters of every cell, and no request exceeds max_model_len.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Self

from forge.bench.workload import CELLS_FILE
from forge.errors import InvalidConfig, InvalidRequest
from forge.request import SamplingParams, Structure

PARAM_NAMES = frozenset(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logprobs "
    "structured_outputs".split()
)
"""Fields of parameters, with the names of vLLM. Lengths are fixed by the cell."""

OPTION_NAMES = frozenset(
    "max_model_len max_num_seqs enable_prefix_caching gpu_memory_utilization".split()
)
"""Options of an engine that forge and vLLM name alike."""

Bounds = tuple[int, int]
"""Bounds of tokens, both included."""

Params = Mapping[str, Any]


class Batch(NamedTuple):
    """Requests that are sent at once, with lengths within bounds."""

    requests: int
    input: Bounds
    output: Bounds


class TraceBatch(NamedTuple):
    """Requests that are sent at once, with lengths drawn from a trace."""

    requests: int


class Conversations(NamedTuple):
    """Conversations that advance together, each turn with the whole context before it.

    prefix          tokens of the system prompt that all of them share
    input, output   tokens that each turn adds
    """

    conversations: int
    turns: int
    prefix: int
    input: Bounds
    output: Bounds


class OpenLoop(NamedTuple):
    """Requests over HTTP at the times of a trace, scaled to a mean `rate` a second."""

    rate: float
    seconds: float


Load = Batch | TraceBatch | Conversations | OpenLoop
LOADS: tuple[Any, ...] = (Batch, TraceBatch, Conversations, OpenLoop)


class Cell(NamedTuple):
    """A load and the parameters of its requests.

    label    name on pages
    params   request i has params[i % len(params)]
    """

    name: str
    label: str
    load: Load
    params: tuple[Params, ...]


class Traffic(NamedTuple):
    """All traffic cells.

    seed      of all draws
    rounds    measured rounds of each cell, after one of warm-up
    options   of every engine
    """

    seed: str
    rounds: int
    options: Mapping[str, Any]
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, path: Path = CELLS_FILE) -> Self:
        """Read the cells of a file. Raises InvalidConfig that names the cell and the field."""
        entry = json.loads(path.read_text()).get("traffic", {})
        keys = {*cls._fields}
        check(
            entry.keys() - {"about"} == keys,
            "",
            f"has other keys than {names(keys)}",
            "Add or remove some",
        )
        check(isinstance(entry["seed"], str), "seed", "is no name", "Give a string")
        check_options(entry["options"])
        max_len = entry["options"]["max_model_len"]
        cells = tuple(parse_cell(each, max_len) for each in entry["cells"])
        for index, cell in enumerate(cells):
            is_new = cell.name not in {each.name for each in cells[:index]}
            check(is_new, cell.name, "is there twice", "Rename one of them")
        return cls(entry["seed"], parse_count("rounds", entry["rounds"]), entry["options"], cells)

    def select(self, chosen: Sequence[str]) -> Self:
        """Return only the cells of these names, in this order. Raises InvalidConfig."""
        by_name = {cell.name: cell for cell in self.cells}
        for name in chosen:
            known = ", ".join(by_name)
            if name not in by_name:
                raise InvalidConfig("cells", f"there is no cell {name!r}", f"Use some of: {known}")
        return self._replace(cells=tuple(by_name[name] for name in dict.fromkeys(chosen)))


# Checks of the file.


def names(keys: Set[str]) -> str:
    """Return names in one order, with commas."""
    return ", ".join(sorted(keys))


def check(condition: bool, place: str, problem: str, remedy: str) -> None:
    """Raise InvalidConfig for this place of the traffic cells unless the condition holds."""
    if not condition:
        raise InvalidConfig(
            "cells.json", f"{' '.join(('traffic', place)).strip()} {problem}", remedy
        )


def parse_count(place: str, value: Any) -> int:
    """Return the value, a positive integer. Raises InvalidConfig."""
    is_count = type(value) is int and value >= 1
    check(is_count, place, f"is {value!r}, not a positive integer", "Give 1 or more")
    return int(value)


def parse_bounds(place: str, value: Any) -> Bounds:
    """Return one length, or [low, high], as bounds. Raises InvalidConfig."""
    bounds = value if isinstance(value, list) else [value, value]
    check(len(bounds) == 2, place, f"is {value!r}, not a length or two", "Give 200 or [128, 256]")
    low, high = (parse_count(place, each) for each in bounds)
    check(low <= high, place, f"is {value!r}, which is empty", "Give the lower bound first")
    return low, high


def parse_number(place: str, value: Any) -> float:
    """Return the value, a finite number above 0. Raises InvalidConfig."""
    is_number = type(value) in (int, float) and 0 < value < math.inf
    check(is_number, place, f"is {value!r}, not a number above 0", "Give 10, say")
    return float(value)


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "requests": parse_count,
    "conversations": parse_count,
    "turns": parse_count,
    "prefix": parse_count,
    "input": parse_bounds,
    "output": parse_bounds,
    "rate": parse_number,
    "seconds": parse_number,
}
"""Parsers of the fields of loads."""


def check_options(options: Any) -> None:
    """Raise InvalidConfig for options that an engine may not have."""
    check(isinstance(options, dict), "options", "is no object", "Give names and values")
    unknown = options.keys() - OPTION_NAMES
    check(not unknown, f"options {names(unknown)}", "is unknown", f"Use {names(OPTION_NAMES)}")
    check("max_model_len" in options, "options", "has no max_model_len", "Give 8192, say")
    parse_count("options max_model_len", options["max_model_len"])


def parse_cell(entry: Any, max_len: int) -> Cell:
    """Return the cell of an entry. Raises InvalidConfig that names the cell and the field."""
    check(isinstance(entry, dict), f"cells {entry!r}", "is no object", "Give name, label, ...")
    for key in ("name", "label", "params"):
        check(key in entry, f"cell {entry.get('name', entry)!r}", f"has no {key}", "Add it")
    name, params = entry["name"], entry["params"]
    fields = {key: entry[key] for key in entry if key not in ("name", "label", "params")}
    load_types = [each for each in LOADS if {*each._fields} == fields.keys()]
    known = " | ".join(" ".join(each._fields) for each in LOADS)
    check(bool(load_types), name, f"has {names({*fields})}, which is no load", f"Use {known}")
    load_type: Callable[..., Load] = load_types[0]
    load = load_type(**{key: PARSERS[key](f"{name} {key}", fields[key]) for key in fields})
    longest = longest_request(load)
    remedy = f"Shorten it, or raise max_model_len above {max_len}"
    check(longest <= max_len, name, f"has a request of {longest} tokens", remedy)
    variants = tuple(params) if isinstance(params, list) else (params,)
    check(bool(variants), name, "has no params", "Give an object, or a list of them")
    for each in variants:
        check_params(name, each)
    return Cell(name, entry["label"], load, variants)


def longest_request(load: Load) -> int:
    """Return the tokens of the longest request; 0 where a trace decides, which is clipped."""
    match load:
        case Batch():
            return load.input[1] + load.output[1]
        case Conversations():
            return load.prefix + load.turns * (load.input[1] + load.output[1])
    return 0


def check_params(name: str, params: Any) -> None:
    """Raise InvalidConfig for parameters that are unknown or out of bounds."""
    check(isinstance(params, dict), f"{name} params", f"is {params!r}", "Give names and values")
    unknown = params.keys() - PARAM_NAMES
    check(not unknown, f"{name} params {names(unknown)}", "is unknown", f"Use {names(PARAM_NAMES)}")
    structure = params.get("structured_outputs", {"json": {}})
    is_schema = isinstance(structure, dict) and structure.keys() == {"json"}
    check(is_schema, f"{name} structured_outputs", "is no schema", 'Give {"json": SCHEMA}')
    try:
        create_params(params, 1)
    except InvalidRequest as error:
        raise InvalidConfig(
            "cells.json", f"traffic {name} {error.field} {error.problem}", error.remedy
        ) from None


def create_params(params: Params, output: int) -> SamplingParams:
    """Return forge's parameters for exactly `output` tokens. Raises InvalidRequest."""
    values = {key: value for key, value in params.items() if key != "structured_outputs"}
    if "structured_outputs" in params:
        values["structure"] = Structure.json_schema(params["structured_outputs"]["json"])
    return SamplingParams(max_tokens=output, ignore_eos=True, **values)
