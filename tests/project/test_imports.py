"""The import arrows: what each module of forge may import.

    errors ◄ config, request ◄ seam ◄ blocks, sampling, policy ◄ scheduler ◄ engine ◄ llm ◄ server
                               seam ◄ sampling ◄ models    a model never imports the scheduler

The arrows are read from the syntax trees, so an import inside a function or under TYPE_CHECKING
counts too. A new module needs a row in ALLOWED_IMPORTS.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORGE = ROOT / "forge"

ENGINE_AND_BELOW = {
    *("errors", "config", "request", "seam", "sampling", "blocks"),
    *(
        "policy",
        "policies.*",
        "sessions",
        "sequence",
        "host_cache",
        "disk_cache",
        "kv_events",
        "prefix_cache",
        "scheduler",
        "engine",
        "reasoning_matcher",
        "structured_output",
        "tokenizer",
    ),
    *("acceptance", "proposers", "draft_length", "drafting", "recording"),
    *("max_len", "policy_calls", "commit_gate", "plan_rows", "step_bound", "uniform_steps"),
    *("pause", "pause_state", "weights", "weight_versions", "engine_checks", "steps_in_flight"),
    "absent_model",
    *("recorder", "grammar_backend", "matchers", "stop_strings", "failure_log"),
    "wait_reasons",
    *("schema_keywords", "schema_references", "schema_grammar", "schema_check", "strict_json"),
    *("reasoning_counter", "thinking_budget"),
}
HOSTS = {"engine_loop", "engine_messages", "engine_thread", "engine_process"}
LLM_AND_BELOW = (
    ENGINE_AND_BELOW
    | HOSTS
    | {"log", "outputs", "overhead", "start_log", "tier_options", "tier_status", "version"}
    | {"kv_event_options", "kv_event_wire", "kv_publisher", "load_report"}
    | {"film.*", "film_attachment", "recorder_chain"}
    | {"deferred_interrupt", "engine_options", "policy_loader", "timings", "timings_recorder"}
    | {"sampling_defaults"}
    | {"models.*", "llm", "async_llm", "rank_start", "ranks.*", "replay_run"}
)

# module -> modules of forge it may import. `x.*` is the package forge/x and everything in it.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "failure_log": {"errors"},
    "version": set(),
    "start_log": set(),
    "requirements": set(),
    "config": {"errors"},
    "limits": {"errors"},
    "tier_options": {"config", "errors"},
    "timings": set(),
    "schema_keywords": set(),
    "schema_grammar": {"schema_keywords"},
    "schema_references": {"schema_keywords"},
    "strict_json": set(),
    "schema_check": {"schema_grammar", "schema_references", "strict_json"},
    "request": {"errors", "schema_keywords", "timings"},
    "seam": {"request"},
    "sampling": {"errors", "request", "seam"},
    "sampling_defaults": {"errors", "request"},
    "deferred_interrupt": set(),
    "pause": set(),
    "pause_state": {"errors", "pause", "request", "sessions"},
    "recorder": {"pause", "request", "seam", "sessions"},
    "grammar_backend": {
        *("cpu_count", "errors", "feedback_queue", "mask_threads", "request", "sequence"),
        *("structured_output", "tokenizer"),
    },
    "reasoning_counter": set(),
    "thinking_budget": {"reasoning_counter", "request", "sequence"},
    "matchers": {
        *("errors", "grammar_backend", "request", "seam", "sequence"),
        *("thinking_budget", "tokenizer"),
    },
    "stop_strings": {"request", "tokenizer"},
    "steps_in_flight": {"seam"},
    "absent_model": {"errors", "seam"},
    "engine_checks": {"config", "errors", "request", "seam", "tokenizer", "weights"},
    "weights": {"errors"},
    "weights_client": {"errors", "weights"},
    "weight_versions": {"errors", "request", "sequence"},
    "kv_events": set(),
    "blocks": {"errors", "kv_events"},
    "sessions": {"blocks", "request"},
    "policy": {"errors", "request", "sessions"},
    "policies.*": {"policy", "sessions"},
    "max_len": {"config", "errors", "request", "sequence"},
    "policy_calls": {"errors", "policy", "sequence", "sessions"},
    "commit_gate": {"sequence"},
    "step_bound": {"config"},
    "wait_reasons": set(),
    "film.*": {
        *("blocks", "failure_log", "film.*", "pause", "request", "scheduler", "seam", "sessions"),
        "version",
    },
    "uniform_steps": {"blocks", "plan_rows", "prefix_cache", "request", "seam", "sequence"},
    "plan_rows": {"blocks", "drafting", "seam", "sequence"},
    "tokenizer": {"errors"},
    "sequence": {"request", "sampling", "seam", "blocks", "sessions"},
    "host_cache": {"blocks", "config", "kv_events", "seam", "sequence"},
    "disk_cache": {"blocks", "config", "host_cache", "kv_events", "seam"},
    "prefix_cache": {"blocks", "config", "host_cache", "kv_events", "request", "sequence"},
    "cpu_count": set(),
    "mask_threads": set(),
    "reasoning_matcher": {"request", "sequence"},
    "structured_output": {
        *("errors", "feedback_queue", "mask_threads", "reasoning_matcher"),
        *("request", "schema_check", "schema_grammar", "sequence", "strict_json"),
        "tokenizer",
    },
    "feedback_queue": set(),
    "grammar_sandbox": {"errors", "feedback_queue", "request", "structured_output", "tokenizer"},
    "acceptance": set(),
    "proposers": {"sampling"},
    "draft_length": {"config", "sequence", "acceptance"},
    "drafting": {"blocks", "config", "draft_length", "proposers", "seam", "sequence"},
    "recording": {"config", "errors", "pause", "request", "seam", "sessions"},
    "scheduler": ENGINE_AND_BELOW
    - {"reasoning_matcher", "recording", "tokenizer", "engine", "scheduler", "structured_output"}
    - {"reasoning_counter", "thinking_budget", "matchers"},
    "engine": ENGINE_AND_BELOW - {"engine", "structured_output", "reasoning_matcher", "recording"},
    "overhead": {"config", "engine", "request", "seam"},
    "invariants": {
        *("blocks", "drafting", "engine", "host_cache", "scheduler", "seam", "sequence"),
        "sessions",
    },
    "models.*": {
        *("errors", "config", "request", "seam", "sampling", "acceptance", "tokenizer"),
        *("cpu_count", "failure_log", "models.*", "ranks.*", "sampling_defaults", "start_log"),
        *("tier_options", "version", "weights"),
    },
    "models.hf.kv_cache_pool": {"blocks", "errors", "models.*", "seam"},
    "outputs": {"request", "stop_strings", "timings", "tokenizer"},
    "progress": {"outputs"},
    "chat_prompts": {"errors", "tokenizer"},
    "kv_event_wire": {"errors", "kv_events"},
    "kv_event_options": {"errors"},
    "kv_publisher": {
        *("errors", "failure_log", "kv_event_options", "kv_event_wire", "kv_events"),
    },
    "load_report": {"scheduler"},
    "routing.*": {"blocks", "errors", "kv_events", "routing.*"},
    "ranks.*": {"errors", "log", "ranks.*"},
    "replay_run": ENGINE_AND_BELOW - {"engine"},
    "rank_start": ENGINE_AND_BELOW | {"models.*", "ranks.*", "replay_run", "start_log"},
    "policy_loader": {"errors", "policies.*", "policy"},
    "engine_options": ENGINE_AND_BELOW
    | {"kv_event_options", "kv_publisher", "models.*", "overhead", "policy_loader"}
    | {"rank_start", "ranks.*", "start_log", "version"},
    "llm": ENGINE_AND_BELOW
    | {"chat_prompts", "deferred_interrupt", "engine_options", "outputs", "progress"}
    | {"recorder_chain", "timings_recorder"},
    "session_timers": {"sessions"},
    "tier_status": {"scheduler"},
    "engine_messages": {
        *("engine", "errors", "feedback_queue", "film.*", "kv_publisher", "pause", "request"),
        *("sessions", "tier_status", "weights"),
    },
    "engine_loop": {
        *("engine", "engine_messages", "errors", "feedback_queue", "film_attachment"),
        *("recorder_chain", "request", "session_timers", "timings_recorder", "weights"),
    },
    "recorder_chain": {"engine", "pause", "recorder", "request", "seam", "sessions"},
    "timings_recorder": {
        *("recorder", "recorder_chain", "request", "scheduler", "seam", "sequence", "timings"),
    },
    "film_attachment": {"engine", "film.*", "recorder_chain"},
    "engine_thread": {"engine_loop", "engine_messages", "engine_options", "policy", "request"},
    "engine_process": ENGINE_AND_BELOW
    | {"engine_loop", "engine_messages", "engine_options", "engine_thread", "log"}
    | {"models.*", "policy_loader", "start_log"}
    | {"rank_start", "ranks.*", "sampling_defaults"},
    "log": set(),
    "async_llm": ENGINE_AND_BELOW
    | HOSTS
    | {"engine_options", "llm", "load_report", "outputs", "sampling_defaults"},
    "trainer_access": {"errors", "weights"},
    "server.*": LLM_AND_BELOW
    | {"__init__", "grammar_sandbox", "limits", "server.*", "trainer_access"},
    "ray.*": set(),
    "ray.routing_key": set(),
    "ray.scaling": set(),
    "ray.routing_state": {"ray.routing_key", "routing.*"},
    "ray.call": {"errors", "ray.routing_key"},
    "ray.fleet_options": {"cli.*", "errors", "routing.*"},
    "ray.replica": {
        *("async_llm", "engine_options", "errors", "limits", "ray.call", "ray.scaling", "server.*"),
    },
    "ray.ingress": {"ray.call", "ray.routing_key", "server.*"},
    "ray.request_router": {"ray.call", "ray.routing_key", "ray.routing_state", "routing.*"},
    "ray.application": {
        *("cli.*", "ray.call", "ray.fleet_options", "ray.ingress", "ray.replica"),
    },
    "ray.__init__": {"ray.application"},
    "cli.*": LLM_AND_BELOW
    | {"__init__", "cli.*", "limits", "requirements", "server.*", "trainer_access"},
    "cli.main": LLM_AND_BELOW | {"__init__", "bench.*", "cli.*", "learn.*", "sim.*"},
    "learn.*": LLM_AND_BELOW | {"__init__", "cli.*", "learn.*", "sim.*"},
    "__init__": LLM_AND_BELOW,
    "__main__": set(),
    "sim.*": LLM_AND_BELOW
    | {"__init__", "cli.*", "invariants", "limits", "routing.*", "server.*", "sim.*"},
    "bench.*": LLM_AND_BELOW
    | {"__init__", "bench.*", "cli.*", "limits", "ray.*", "routing.*", "server.*", "sim.*"},
}

# module -> packages from outside forge and the standard library.
ALLOWED_PACKAGES: dict[str, set[str]] = {
    "models.hf.*": {
        *("cuda", "flashinfer", "numpy", "torch", "triton"),
        *("huggingface_hub", "safetensors", "tokenizers", "transformers"),
    },
    "models.llama": {"numpy", "safetensors"},
    "models.llama_model": {"numpy", "safetensors"},
    "kv_event_wire": {"msgspec"},
    "kv_publisher": {"zmq"},
    "progress": {"tqdm"},
    "mask_threads": {"llguidance"},
    "structured_output": {"llguidance"},
    "schema_check": {"llguidance"},
    "grammar_sandbox": {"llguidance"},
    "server.otel_traces": {"opentelemetry"},
    "weights_client": {"torch"},
    "server.*": {"anyio", "h11", "prometheus_client", "pydantic", "starlette", "uvicorn"},
    "cli.*": {"yaml"},
    "ray.*": {"starlette"},
    "ray.application": {"ray", "starlette"},
    "ray.request_router": {"ray"},
    "requirements": {"packaging"},
    # The check that this package is the one that runs stands outside of it.
    "__main__": {"forge_llm_engine"},
    "bench.*": {
        *(
            "PIL",
            "httpx",
            "locust",
            "matplotlib",
            "numpy",
            "ray",
            "safetensors",
            "tokenizers",
            "torch",
            "transformers",
            "vllm",
        )
    },
    "sim.*": {"PIL", "matplotlib", "numpy", "torch"},
}

# module -> what it imports inside functions only, so that `forge --help` stays quick.
LAZY_IMPORTS: dict[str, set[str]] = {
    "cli.*": {"requirements", "server.*", "yaml"},
    "cli.main": {"bench.*", "learn.*", "sim.*"},
    "models.loader": {"models.hf.*"},
    "rank_start": {"models.hf.*"},
    "engine": {"mask_threads", "structured_output"},
    "models.embedded": {"models.llama"},
    "kv_event_wire": {"msgspec"},
    "kv_publisher": {"zmq"},
    "progress": {"tqdm"},
    "weights_client": {"torch"},
    "ray.__init__": {"ray.application"},
}

# package -> its folders and files, top to bottom: each imports from itself and from those below it.
ORDER: dict[str, tuple[str, ...]] = {
    "models.hf": (
        *("__init__", "loading", "parallel", "model", "checked_moves", "block_moves", "host_pool"),
        "block_sums",
        *("runner", "step", "speculation", "sampling"),
        *("decoders", "attention", "ops", "tokenizer", "transformers_cache"),
        "kv_cache_pool",
        *("kv_cache", "cuda_module", "binary_cache", "buffers", "progress", "weights"),
        "weight_names",
        "shared_weights",
    ),
    "sim": (
        *(
            "commands",
            "film_command",
            "fleet_command",
            "capacity",
            "reports",
            "run_options",
            "exploration",
            "sweep",
        ),
        *("baselines", "eviction", "fleet_scenario", "fleet_log", "fleet"),
        *("scenario", "fast_forward", "faults", "world", "session_metrics", "block_accesses"),
        *("answer_recorder", "decision_log", "wall_clock", "clock", "calibration"),
        *("cost", "workloads", "metrics"),
        *("units", "draws", "length_model", "replay", "__init__"),
    ),
}

# The functional core: values in, values out. Time, seeds and text arrive as arguments.
CORE = (
    *(
        "request",
        "seam",
        "sampling",
        "acceptance",
        "blocks",
        "policy",
        "sequence",
        "host_cache",
        "disk_cache",
        "kv_events",
        "prefix_cache",
        "sessions",
    ),
    *("routing.prefix_index", "routing.replica_table", "routing.router"),
    *("proposers", "draft_length", "drafting", "max_len", "policy_calls", "commit_gate"),
    *("plan_rows", "step_bound", "uniform_steps", "wait_reasons", "scheduler"),
)
AMBIENT_MODULES = {
    *("asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets"),
    *("socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}
# id() differs between processes, hash() between hash seeds; the rest talks to the outside.
AMBIENT_CALLS = {"hash", "id", "input", "open", "print"}

PUBLIC = (
    *("LLM", "AsyncLLM", "SamplingParams", "Request", "Engine", "EngineConfig"),
    *("Model", "StepPlan", "BlockPool", "Scheduler", "HashModel"),
)
HEAVY = {
    "llguidance",
    "matplotlib",
    "numpy",
    "pydantic",
    "starlette",
    "torch",
    "transformers",
    "uvicorn",
}


class Import(NamedTuple):
    """One arrow. `inside` says that the target is a module of forge, named without `forge.`."""

    target: str
    inside: bool
    line: int
    in_function: bool


def module_name(path: Path) -> str:
    """Return the name of a file in the tables: `blocks`, `models.hash`, `__init__`, `sim.world`."""
    root = FORGE if path.is_relative_to(FORGE) else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts)


def module_paths() -> list[Path]:
    """Return the files of forge, sim and bench. rglob does not follow the links in forge."""
    return sorted(
        path for name in ("forge", "sim", "bench") for path in (ROOT / name).rglob("*.py")
    )


def find_row(module: str, table: dict[str, set[str]]) -> set[str] | None:
    """The row of `module`: its own, or that of the nearest package it is in."""
    return next((table[name] for name in (module, *_packages(module)) if name in table), None)


def is_listed(module: str, row: set[str]) -> bool:
    return module in row or any(package in row for package in _packages(module))


def _packages(module: str) -> list[str]:
    """`models.hf.*`, `models.*` for `models.hf.pool`; `yaml.*` for `yaml`: the nearest first."""
    parts = module.split(".")
    return [".".join(parts[:count]) + ".*" for count in range(max(1, len(parts) - 1), 0, -1)]


def read(path: Path) -> tuple[str, str]:
    """Return the source of a module and its name."""
    return path.read_text(encoding="utf-8"), module_name(path)


@cache
def imports(source: str, module: str) -> tuple[Import, ...]:
    """Every import in `source`, which is the text of forge's `module`."""
    return tuple(_imports_below(ast.parse(source), module, in_function=False))


def _imports_below(tree: ast.AST, module: str, *, in_function: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # most of a tree, and an import is a statement
            continue
        for name in _imported_names(node, module):
            inside = name == "forge" or name.startswith("forge.")
            target = _inside_name(name) if inside else name.partition(".")[0]
            yield Import(target, inside, getattr(node, "lineno", 0), in_function)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _imports_below(node, module, in_function=in_function or function)


def _imported_names(node: ast.AST, module: str) -> list[str]:
    """The absolute dotted names that one statement imports from; [] if it is no import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    origin = node.module or ""
    if node.level:
        package = ["forge", *module.split(".")[:-1]]
        origin = ".".join(package[: len(package) - node.level + 1] + origin.split(".")).rstrip(".")
    return [_submodule_or(origin, alias.name) for alias in node.names]


def _submodule_or(origin: str, name: str) -> str:
    """`from forge import blocks` is about forge.blocks; `from forge import LLM` about forge."""
    below = ROOT.joinpath(*origin.split("."), name)
    found = below.with_suffix(".py").is_file() or below.is_dir()
    return f"{origin}.{name}" if origin.startswith("forge") and found else origin


def _inside_name(name: str) -> str:
    return name.removeprefix("forge").removeprefix(".") or "__init__"


def find_forbidden_imports(source: str, module: str) -> list[str]:
    """What `source` imports and must not, one sentence each."""
    allowed = find_row(module, ALLOWED_IMPORTS)
    if allowed is None:
        return [
            f"forge.{module} has no row in ALLOWED_IMPORTS (tests/project/test_imports.py): "
            "list what it may import"
        ]
    outside = find_row(module, ALLOWED_PACKAGES) or set()
    lazy = find_row(module, LAZY_IMPORTS) or set()
    faults = []
    for found in imports(source, module):
        where = f"forge.{module} line {found.line}"
        if found.inside and not is_listed(found.target, allowed):
            faults.append(f"{where} imports forge.{found.target}: that arrow goes the wrong way")
        if not found.inside and found.target not in sys.stdlib_module_names | outside:
            faults.append(f"{where} imports {found.target}, which is outside the standard library")
        if is_listed(found.target, lazy) and not found.in_function:
            faults.append(f"{where} imports {found.target} at the top: import it in a function")
    return faults


def find_upward_imports(source: str, module: str) -> list[str]:
    """List the imports of a module from above it in the ORDER of its package, one sentence each."""
    package = next((name for name in ORDER if module.startswith(f"{name}.")), None)
    if package is None:
        return []
    order = ORDER[package]
    node = module.removeprefix(f"{package}.").partition(".")[0]
    if node not in order:
        return [f"forge.{module} is in no place of ORDER (tests/project/test_imports.py): add it"]
    upward = []
    for found in imports(source, module):
        if found.inside and (found.target + ".").startswith(f"{package}."):
            target = found.target.removeprefix(package).removeprefix(".").partition(".")[0]
            if order.index(target or "__init__") < order.index(node):
                upward.append(
                    f"forge.{module} line {found.line} imports forge.{found.target} above"
                )
    return upward


def find_hidden_inputs(source: str) -> list[str]:
    """What makes `source` depend on more than its arguments, one sentence each."""
    faults = [
        f"line {found.line} imports {found.target}"
        for found in imports(source, "core")
        if found.target in AMBIENT_MODULES and not found.inside
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            faults.append(f"line {node.iter.lineno} iterates over a set")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, ordered = node.func.id, node.func.id in {"enumerate", "iter", "list", "tuple"}
            if name in AMBIENT_CALLS:
                faults.append(f"line {node.lineno} calls {name}()")
            if ordered and any(map(_is_set, node.args)):
                faults.append(f"line {node.lineno} gives a set an order")
    return faults


def _is_set(node: ast.expr) -> bool:
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
    return False


def test_every_import_follows_an_arrow() -> None:
    faults = [fault for path in module_paths() for fault in find_forbidden_imports(*read(path))]
    assert faults == []


def test_imports_within_a_package_point_one_way() -> None:
    upward = [fault for path in module_paths() for fault in find_upward_imports(*read(path))]
    assert upward == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.hf.sampling.gumbel", "from forge.models.hf.runner import model_runner"),
        ("models.hf.buffers", "import forge.models.hf.kv_cache"),
        ("models.hf.ops.reference", "from forge.models.hf import HFModel"),
        ("sim.cost.table", "def late():\n    from forge.sim.world import World"),
        ("sim.gossip", "import math"),
    ],
)
def test_an_import_from_above_is_found(module: str, source: str) -> None:
    assert len(find_upward_imports(source, module)) == 1


def test_every_folder_and_file_of_an_ordered_package_is_in_its_order() -> None:
    names = {module_name(path) for path in module_paths()}
    for package, order in ORDER.items():
        prefix = f"{package}."
        nodes = {n.removeprefix(prefix).partition(".")[0] for n in names if n.startswith(prefix)}
        assert nodes == set(order)
        assert len(order) == len(set(order))


def test_every_row_of_the_table_is_about_a_module_that_exists() -> None:
    modules = [module_name(path) for path in module_paths()]
    rows = dict.fromkeys([*ALLOWED_IMPORTS, *ALLOWED_PACKAGES, *LAZY_IMPORTS, *CORE])
    assert [row for row in rows if not any(is_listed(module, {row}) for module in modules)] == []


def test_the_table_of_arrows_has_no_circle() -> None:
    arrows = {module: row - {module} for module, row in ALLOWED_IMPORTS.items()}
    assert len(list(TopologicalSorter(arrows).static_order())) == len(ALLOWED_IMPORTS)


def test_every_file_held_at_full_coverage_exists() -> None:
    """The report leaves out a file that is not there, and would pass."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    held = tools["coverage"]["run"]["include"]
    assert held and [name for name in held if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_reads_no_clock_no_environment_and_no_unordered_set(module: str) -> None:
    path = FORGE.joinpath(*module.split(".")).with_suffix(".py")
    assert find_hidden_inputs(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("blocks", "from forge.scheduler import Scheduler", "wrong way"),
        ("blocks", "from forge import LLM", "imports forge.__init__"),
        ("blocks", "from forge import errors, engine", "imports forge.engine"),
        ("blocks", "def late():\n    import forge.engine", "wrong way"),
        ("models.hash", "from ..scheduler import Scheduler", "imports forge.scheduler"),
        ("models.hash", "from .. import blocks", "imports forge.blocks"),
        ("engine", "import torch.cuda", "imports torch"),
        ("engine", "import starlette", "outside the standard library"),
        ("__init__", "from forge.server import app", "wrong way"),
        ("cli.commands", "from forge.server import app", "in a function"),
        ("cli.main", "import forge.sim.clock", "in a function"),
        ("cli.parser", "def late():\n    import forge.sim.clock", "wrong way"),
        ("models.hash", "import torch", "imports torch"),
        ("models.hf.pool", "from forge import scheduler", "wrong way"),
        ("models.loader", "from forge.models.hf.model import HFModel", "in a function"),
        ("gossip", "import math", "no row in ALLOWED"),
    ],
)
def test_an_import_against_the_arrows_is_found(module: str, source: str, fault: str) -> None:
    (found,) = find_forbidden_imports(source, module)
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("blocks", "import math\nfrom forge.errors import ForgeError\nfrom . import errors"),
        ("models.hash", "from ..sampling import mix\nfrom .logits import LogitsModel"),
        ("models.hf.pool", "import torch\nfrom forge.models.hf import attention"),
        ("models.loader", "def load():\n    from forge.models.hf import open_model"),
        ("server.app", "import starlette.routing\nfrom forge import __version__"),
        ("cli.commands", "def serve():\n    from forge.server import app"),
        ("cli.main", "def main():\n    import forge.sim.commands"),
    ],
)
def test_an_import_along_the_arrows_is_left_alone(module: str, source: str) -> None:
    assert find_forbidden_imports(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from os import environ",
        "for x in {1, 2}: pass",
        "[x for x in set(y)]",
        "{x: 1 for x in {y for y in z}}",
        "list(frozenset(x))",
        "hash(x)",
        "id(x)",
    ],
)
def test_a_hidden_input_of_the_core_is_found(source: str) -> None:
    assert len(find_hidden_inputs(source)) == 1


def test_sets_that_are_sorted_or_tested_for_members_are_left_alone() -> None:
    assert find_hidden_inputs("for x in sorted(set(y)): x.hash(1); x.id in {1, 2}") == []


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        # What compiles grammars imports no engine: the first structure waits for its start.
        ("import forge.grammar_sandbox", {"asyncio", "forge.engine", "forge.llm"}),
        (f"import forge; [getattr(forge, name) for name in {PUBLIC}]", HEAVY),
        ("import forge.cli.main", HEAVY),
    ],
    ids=["import forge.grammar_sandbox", "every public name", "import forge.cli.main"],
)
def test_an_import_loads_nothing_that_takes_long(program: str, unwanted: set[str]) -> None:
    """In a process of its own: this one has loaded them."""
    report = f"{program}\nimport sys\nprint(sorted({unwanted!r} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr, run.stdout.strip()) == (0, "", "[]")
