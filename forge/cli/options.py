"""The table of options: one entry for each flag, variable, key of a file and row of the docs.

Owns the table. Flags, environment variables, keys of a file and the tables of docs/Command-line.md
derive from it. Name, type, default and help of an engine's options are those of EngineConfig,
DeviceOptions, TierOptions, KVEventOptions, Limits and SamplingParams. The geometry of the cache has
the model's defaults, not those of EngineConfig, so an option that is not given is not passed on.

    EngineConfig.max_num_seqs: int = 256     its docstring's line is the help
        ──► Option ──► --max-num-seqs   FORGE_MAX_NUM_SEQS   max_num_seqs: 8
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple, cast, get_type_hints

from forge.config import MAX_GEOMETRY, DeviceOptions, EngineConfig
from forge.engine_options import DEFAULT_MODEL, Options
from forge.kv_event_options import KVEventOptions
from forge.limits import Limits
from forge.policies import policy_names
from forge.request import SamplingParams
from forge.tier_options import TierOptions

OptionValue = bool | int | float | str | tuple[str, ...]

TYPE_NAMES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "Give one of them"),
    int: ("an integer", "Give a whole number"),
    float: ("a number", "Give a number"),
    str: ("text", "Give text, in quotes in a file"),
    tuple: ("text or a list of texts", "Give text, in quotes in a file"),
}
"""Type of an option -> how an error names it, and the remedy."""

ADDRESS_VARIABLE = "FORGE_ADDR"
"""Holds HOST:PORT. Kubernetes sets FORGE_PORT itself for a service called forge."""


class Option(NamedTuple):
    """An option of the command line, of the environment and of a configuration file.

    name           its keyword in Python
    value_type     bool, int, float or str; tuple: several texts, for which the flag is repeated
    default_text   describes the default where `default` is None
    file_key       its name in a file and, with dashes, on the command line
    """

    name: str
    value_type: type
    default: OptionValue | None
    help: str
    metavar: str
    env_var: str
    file_key: str
    default_text: str = ""

    @property
    def flag(self) -> str:
        """The spelling on the command line: --max-num-seqs."""
        return "--" + self.file_key.replace("_", "-")


def define_option(
    name: str,
    value_type: type,
    default: OptionValue | None,
    text: str,
    metavar: str = "",
    key: str = "",
) -> Option:
    """Create an option whose flag, variable and file key derive from `key`, by default `name`."""
    metavar = metavar or {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}.get(value_type, "")
    key = key or name
    return Option(name, value_type, default, text, metavar, "FORGE_" + key.upper(), key)


def options_from_dataclass(config_type: type, names: Sequence[str]) -> tuple[Option, ...]:
    """Create options for fields of a dataclass. Its docstring has their help."""
    doc_entries = re.findall(
        r"^    (\w+) {2,}(\S.*(?:\n {20,}.*)*)", config_type.__doc__ or "", re.MULTILINE
    )
    helps = {name: " ".join(text.split()) for name, text in doc_entries}
    hints = get_type_hints(config_type)
    defaults = {each.name: cast(OptionValue | None, each.default) for each in fields(config_type)}
    value_types = {
        name: next(k for k in TYPE_NAMES if hints[name] in (k, k | None)) for name in names
    }
    return tuple(define_option(n, value_types[n], defaults[n], helps.get(n, "")) for n in names)


MODEL_OPTION = define_option(
    "model",
    str,
    DEFAULT_MODEL,
    "tiny, hash, hash with options: hash:step_ms=2, or a checkpoint's folder or HuggingFace id",
    "MODEL",
)

SERVER_OPTIONS = (
    define_option("host", str, "127.0.0.1", "address to listen on")._replace(
        env_var=ADDRESS_VARIABLE
    ),
    define_option("port", int, 8080, "port to listen on; 0 takes a free one")._replace(
        env_var=ADDRESS_VARIABLE
    ),
    define_option(
        "api_key",
        tuple,
        None,
        "what clients must send; a public address needs one; given again, it is another tenant's",
    ),
    define_option("served_model_name", str, None, "the model's name over HTTP, if not MODEL"),
    define_option(
        "allowed_hosts",
        str,
        None,
        "names, with commas between, that requests may call the server by; * is any",
        "NAMES",
    )._replace(default_text="this machine's on 127.0.0.1, else any"),
    define_option("metrics_compat", str, None, "vllm: /metrics has the names of vLLM too", "NAME"),
    define_option(
        "reasoning_parser",
        str,
        None,
        "how the model writes its reasoning: qwen3, deepseek_r1, openai_gptoss, ... or none",
        "NAME",
    )._replace(default_text="the chat template's"),
    define_option(
        "reasoning_config",
        str,
        None,
        "text that ends a reasoning whose budget is spent, with the end marker at its end: "
        '{"reasoning_end_str": "Time is up.</think>"}, say',
        "JSON",
    )._replace(default_text="the end marker alone"),
    define_option(
        "tool_call_parser",
        str,
        None,
        "how the model writes tool calls: hermes, qwen3_coder, mistral, ... or none",
        "NAME",
    )._replace(default_text="the chat template's"),
    define_option(
        "root_path",
        str,
        None,
        "beginning of the paths of requests that a proxy leaves in, /llm, say; the routes are "
        "there and where they were",
        "PATH",
    ),
    define_option(
        "return_tokens_as_token_ids",
        bool,
        False,
        "default of this field: the tokens of logprobs are named token_id:5",
    ),
    define_option(
        "enable_force_include_usage",
        bool,
        False,
        "every chunk of every stream of completions and chats has the usage",
    ),
    define_option(
        "enable_per_request_metrics",
        bool,
        False,
        "default of return_metrics: completions and chats have the times of their request",
    ),
    define_option(
        "film", bool, False, "the page at / draws the scheduler as it runs, from GET /film"
    ),
    define_option(
        "otlp_traces_endpoint",
        str,
        None,
        "where spans of requests are sent, as OTLP over HTTP, http://127.0.0.1:4318/v1/traces, "
        "say; needs the extra otel",
        "URL",
    ),
    define_option(
        "admin_key",
        str,
        None,
        "key of the routes that pause the engine, replace its weights and release its memory; "
        "without it there are no such routes",
        "KEY",
    ),
    define_option(
        "weights_folder", str, None, "folder of the files that updates may name", "FOLDER"
    ),
    define_option(
        "weights_socket",
        str,
        None,
        "Unix socket for updates from the memory of trainers of the same user and machine",
        "PATH",
    ),
)

LIMIT_OPTIONS = tuple(
    each._replace(default_text="none") if each.default is None else each
    for each in options_from_dataclass(Limits, [each.name for each in fields(Limits)])
)

GEOMETRY_NAMES = (*MAX_GEOMETRY, "depth")
"""Fields of EngineConfig whose defaults the model sets."""

DEVICE_OPTIONS = options_from_dataclass(
    DeviceOptions, [each.name for each in fields(DeviceOptions)]
)

TIER_METAVARS = {"kv_disk_path": "FOLDER", "kv_load_rule": "NAME"}

TIER_OPTIONS = tuple(
    each._replace(metavar=TIER_METAVARS.get(each.name, each.metavar))
    for each in options_from_dataclass(TierOptions, [each.name for each in fields(TierOptions)])
)

KV_EVENT_OPTIONS = tuple(
    each._replace(metavar="ADDRESS") if each.name in ("kv_events", "kv_events_replay") else each
    for each in options_from_dataclass(
        KVEventOptions, [each.name for each in fields(KVEventOptions)]
    )
)

SPECULATIVE_OPTIONS = (
    define_option(
        "draft_model",
        str,
        None,
        "a smaller model that proposes tokens ahead of MODEL, which verifies them",
        "MODEL",
        "speculative_model",
    ),
    define_option(
        "num_speculative_tokens", int, None, "most tokens proposed at once, 1 to 16"
    )._replace(default_text="4"),
    define_option(
        "speculative_method",
        str,
        None,
        "draft: a second model proposes; ngram: what followed the same tokens before",
        "NAME",
    )._replace(default_text="draft"),
    define_option(
        "acceptance",
        str,
        None,
        "coupled: token for token the output without drafts; rejection: more drafts are accepted, "
        "and the output is another of the same distribution",
        "NAME",
    )._replace(default_text="coupled"),
)
"""Options of speculative decoding. It is off unless one of them is given."""

RECORD_OPTION = define_option(
    "record", str, None, "file for all that decisions depend on; forge sim replay FILE", "FILE"
)

ENGINE_OPTIONS = (
    *(
        each._replace(default=None, default_text="the model's")
        if each.name in GEOMETRY_NAMES
        else each._replace(default_text="none")
        if each.default is None
        else each
        for each in options_from_dataclass(
            EngineConfig,
            [name for name in get_type_hints(Options) if name in get_type_hints(EngineConfig)],
        )
    ),
    *(each._replace(metavar="NAME") if each.value_type is str else each for each in DEVICE_OPTIONS),
    *TIER_OPTIONS,
    *KV_EVENT_OPTIONS,
    *SPECULATIVE_OPTIONS,
    RECORD_OPTION,
)

POLICY_OPTION = define_option(
    "policy", str, "fcfs", f"{', '.join(policy_names())} or a FILE.py", "NAME|FILE.py"
)

SERVE_OPTIONS = (MODEL_OPTION, *SERVER_OPTIONS, *LIMIT_OPTIONS, *ENGINE_OPTIONS, POLICY_OPTION)
"""Options of `forge serve`, which are also those of the environment and of files."""

HELP_OVERRIDES = {
    "max_tokens": "most output tokens",
    "seed": "64-bit signed; left out, one is taken from the engine's seed and the request",
}
"""Help for options whose docstring in SamplingParams speaks of None, which no flag can give."""

SAMPLING_OPTIONS = tuple(
    each._replace(help=HELP_OVERRIDES.get(each.name, each.help))
    for each in options_from_dataclass(
        SamplingParams,
        (
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
        ),
    )
)
"""Sampling options of `forge generate`, flags only. --stop is separate, as it can be repeated."""

SAMPLING_FLAGS = {each.name: each.flag for each in SAMPLING_OPTIONS} | {"stop": "--stop"}


def closest_matches(name: str, candidates: Sequence[str]) -> list[str]:
    """Return the candidate that was most likely meant, in a list, or an empty list.

    A candidate that begins with `name`, contains it, or is its beginning wins over one that is
    only spelled similarly.
    """
    bare_name = name.strip("-")
    similar = (
        [each for each in candidates if each.startswith(name)]
        or [each for each in candidates if bare_name in each]
        or [each for each in candidates if name.startswith(each)]
    )
    if similar and len(bare_name) > 1:
        return difflib.get_close_matches(name, similar, 1, 0.0)
    return difflib.get_close_matches(name, candidates, 1)
