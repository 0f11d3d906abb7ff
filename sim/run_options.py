"""Options of runs and sweeps on the command line, and the scenario that they make.

Owns flags, help and the axes of a sweep. Knows no output: forge.sim.commands runs the scenario.
Reads neither the environment nor an options file: the command line decides the run.

    --workload agent --profile swe --clients 64 ──► options of the profile ──► Scenario
    --policies fcfs,ageing --rates 10,20        ──► four combinations
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from forge.cli.options import ENGINE_OPTIONS, define_option, options_from_dataclass
from forge.config import EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.policies import policy_names
from forge.policy_loader import load_policy
from forge.sim.cost.cost_spec import cost_num_blocks
from forge.sim.scenario import (
    DEFAULT_NUM_REQUESTS,
    DEFAULT_RATE,
    SHAPE_OPTIONS,
    WORKLOAD_OPTIONS,
    Scenario,
)
from forge.sim.workloads.session_shape import PROFILES, find_profile

REPLACES = {
    "num_blocks": "oversubscription",
    "gpu_memory_utilization": "oversubscription",
    "pause": "pause_mix",
    "turns": "min_turns",
}
"""Option that is given -> the option of a profile that does not hold then."""

BLOCK_SETTERS = ("oversubscription", "gpu_memory_utilization", "num_blocks")
"""Options that set the number of blocks: at most one of them may be given."""

OPTION_OVERRIDES: dict[str, dict[str, Any]] = {
    "workload": {"metavar": "NAME|FILE"},
    "rate": {
        "help": "requests a second",
        "default_text": f"{DEFAULT_RATE:g}, or those of the file",
    },
    "requests": {
        "help": "number of requests",
        "default_text": f"{DEFAULT_NUM_REQUESTS}, or those of the file, once",
    },
    "longest_prompt": {"help": "cut longer prompts of a file", "default_text": "no cut"},
    "longest_output": {"help": "cut longer answers of a file", "default_text": "no cut"},
    "prompt": {
        "metavar": "SPREAD",
        "help": "new tokens of a prompt: 512, 16-1024 or exp:300; or one of several, separated "
        "by commas",
    },
    "output": {"metavar": "SPREAD", "help": "tokens of an answer, in the notation of --prompt"},
    "policy": {"metavar": "NAME|FILE.py", "help": f"{', '.join(policy_names())} or a FILE.py"},
    "cost": {
        "metavar": "COST",
        "help": "time of a step: unit, a millisecond; affine:BASE,ROW,TOKEN in us; "
        "roofline:GPU,MODEL, such as roofline:h200,qwen3-4b; or FILE.json of forge sim calibrate",
    },
    "model": {"metavar": "NAME"},
    "sessions": {
        "help": "number of agent sessions",
        "default_text": "--requests by --turns",
    },
    "min_turns": {
        "help": "fewest turns of an agent session, uniform up to --turns",
        "default_text": "--turns",
    },
    "pause_mix": {
        "metavar": "SHARE:X,...",
        "help": "kinds of pauses in place of --pause, with their mean seconds: 0.7:0.5,0.3:60",
        "default_text": "one kind",
    },
    "compact_at": {
        "help": "tokens of a prompt above which a summary replaces its context",
        "default_text": "never",
    },
    "hints": {"metavar": "NAMES"},
    "oversubscription": {
        "help": "longest contexts of the open sessions, as a multiple of the cache; sets "
        "--num-blocks",
        "default_text": "--num-blocks stays",
    },
}
"""Options of Scenario whose command-line text or metavar differs from the docstring."""

SCENARIO_OPTIONS = tuple(
    each._replace(**OPTION_OVERRIDES.get(each.name, {}))
    for each in options_from_dataclass(
        Scenario, [f.name for f in fields(Scenario) if f.name != "engine"]
    )
)
GEOMETRY_OPTIONS = tuple(
    each._replace(default=getattr(EngineConfig(), each.name), default_text="")
    for each in ENGINE_OPTIONS
    if each.name in EngineConfig.__dataclass_fields__ and each.name not in ("seed", "max_step_ms")
)
DRAFTS_OPTION = define_option(
    "num_speculative_tokens", int, 0, "drafts of a sequence in a step, 0 to 16"
)
PROFILE_OPTION = define_option(
    "profile",
    str,
    None,
    f"{', '.join(PROFILES)}: values of a kind of agent for the options that are not given",
    "NAME",
)
MEMORY_OPTION = define_option(
    "gpu_memory_utilization",
    float,
    None,
    "share of the GPU's memory for weights, steps and cache; sets --num-blocks, with --cost "
    "roofline:GPU,MODEL",
)._replace(default_text="--num-blocks stays")
RUN_OPTIONS = (*SCENARIO_OPTIONS, PROFILE_OPTION, *GEOMETRY_OPTIONS, MEMORY_OPTION, DRAFTS_OPTION)
"""Options that decide a run."""

AXIS_OPTIONS = (
    define_option("policies", str, None, "policies to compare, separated by commas", "NAMES"),
    define_option("rates", str, None, "values of --rate: 10,20,40", "X,X"),
    define_option("budgets", str, None, "values of --max-num-batched-tokens: 512,2048", "N,N"),
    define_option("blocks", str, None, "values of --num-blocks: 256,1024", "N,N"),
    define_option("drafts", str, None, "values of --num-speculative-tokens: 0,2,4", "N,N"),
    define_option("oversubscriptions", str, None, "values of --oversubscription: 1,2,4", "X,X"),
)
"""Options of a sweep besides those of a run; each combination is a run."""

AXIS_TARGETS = {
    "policies": "policy",
    "rates": "rate",
    "budgets": "max_num_batched_tokens",
    "blocks": "num_blocks",
    "drafts": "num_speculative_tokens",
    "oversubscriptions": "oversubscription",
}
"""Option of AXIS_OPTIONS -> the option that receives its values."""


SEEDS_OPTION = define_option(
    "seeds", int, 1, "runs of each combination, one a seed, from --seed on: means and intervals"
)
"""Option of a sweep besides its axes."""


def create_scenario(values: Mapping[str, Any], explicit: frozenset[str]) -> Scenario:
    """Return the scenario of these options. Raises InvalidConfig.

    explicit   names of the options that were given: the workload must accept them
    """
    values, explicit = apply_profile(values, explicit)
    drafts: int = values[DRAFTS_OPTION.name]
    geometry = {each.name: values[each.name] for each in GEOMETRY_OPTIONS}
    utilization = values[MEMORY_OPTION.name]
    if utilization is not None:
        geometry["num_blocks"] = cost_num_blocks(
            values["cost"], utilization, geometry["block_size"]
        )
    speculation = Speculation(num_tokens=drafts) if drafts else None
    engine = EngineConfig(**geometry, seed=values["seed"], speculation=speculation)
    scenario = Scenario(
        **{each.name: values[each.name] for each in SCENARIO_OPTIONS}, engine=engine
    )
    load_policy(scenario.policy)  # an unknown policy is reported before runs that take minutes
    for name in SHAPE_OPTIONS:
        if name in explicit and name not in scenario.options:
            accepting = [each for each, options in WORKLOAD_OPTIONS.items() if name in options]
            raise InvalidConfig(
                name,
                f"the workload {scenario.workload} does not accept it",
                f"Leave it out, or take --workload {accepting[0]}",
            )
    return scenario


def apply_profile(
    values: Mapping[str, Any], explicit: frozenset[str]
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the options with those of their profile, and the names that are given then.

    Raises InvalidConfig.
    """
    name = values[PROFILE_OPTION.name]
    if name is not None:
        if values["workload"] != "agent":
            raise InvalidConfig(
                "profile", f"the workload {values['workload'][:64]} does not accept it",
                "Leave it out, or take --workload agent",
            )  # fmt: skip
        replaced = explicit | {other for given, other in REPLACES.items() if given in explicit}
        added = {key: each for key, each in find_profile(name).items() if key not in replaced}
        values, explicit = {**values, **added}, explicit | added.keys()
    setters = [each for each in BLOCK_SETTERS if each in explicit]
    if len(setters) > 1:
        raise InvalidConfig(
            setters[0], f"it sets the number of blocks, and so does {setters[1]}",
            "Leave one of them out",
        )  # fmt: skip
    return values, explicit


def parse_axis(name: str, text: str | None) -> list[Any]:
    """Return the values of an axis, such as `10,20`; none where it was not given.

    Raises InvalidConfig.
    """
    if text is None:
        return []
    parts = text.split(",")
    if name == "policies":
        return parts
    takes_fractions = name in ("rates", "oversubscriptions")
    kind: Callable[[str], Any] = float if takes_fractions else int
    pattern = r"\d{1,9}(\.\d{1,9})?" if takes_fractions else r"\d{1,9}"
    if not all(re.fullmatch(pattern, part) for part in parts):
        raise InvalidConfig(name, f"{text[:64]!r} is not a list of numbers", "Give 10,20, say")
    return list(map(kind, parts))
