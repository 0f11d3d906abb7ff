"""The command line: `forge serve`, `forge generate`, `forge bench`, `forge sim`, `forge info`.

Owns the table of options, from which flags, environment names, file keys and the tables of
docs/Command-line.md derive, and every line a user reads on a terminal. Knows no scheduler, socket
or model. Name, kind, default and help of what an engine takes are those of EngineConfig,
DeviceOptions and SamplingParams. The geometry has the model's defaults, not those of EngineConfig:
what nobody asked for is not passed on.

    --max-num-seqs 8      ┐
    FORGE_MAX_NUM_SEQS=8  │  the first that is given
    max_num_seqs: 8       │ ─────────────────────────► Settings ──► serve, generate, info
    the default           ┘

Exit status: 0 done, 1 failed on the way, 2 asked for what cannot be, 130 Ctrl-C. A refusal is one
line on standard error; it spells the option as it was given and says what to change.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import logging
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast, get_type_hints

from forge import __version__
from forge.async_llm import AsyncLLM
from forge.config import MAX_GEOMETRY, DeviceOptions, EngineConfig
from forge.errors import ForgeError, InvalidConfig, InvalidRequest, RequestFailed
from forge.limits import Limits
from forge.llm import LLM, Options
from forge.policy import POLICIES
from forge.request import SamplingParams

OptionValue = bool | int | float | str
LLMType = TypeVar("LLMType", LLM, AsyncLLM)

TYPE_NAMES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "Give one of them"),
    int: ("an integer", "Give a whole number"),
    float: ("a number", "Give a number"),
    str: ("text", "Give text, in quotes in a file"),
}
"""How a refusal names each kind of value, and the remedy."""

BOOLEAN_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""What true and false are called in the environment."""

ADDRESS_VARIABLE = "FORGE_ADDR"
"""HOST:PORT. There is no FORGE_PORT: Kubernetes writes that name for a service called forge."""


class Option(NamedTuple):
    """One thing that can be set. `name` is its keyword in Python.

    default_text   what holds where nobody sets it and it has no default, in words
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
        """How it is spelled on the command line."""
        return "--" + self.file_key.replace("_", "-")


def define_option(
    name: str,
    value_type: type,
    default: OptionValue | None,
    text: str,
    metavar: str = "",
    key: str = "",
) -> Option:
    """An option whose name elsewhere follows from its own, or from `key`."""
    metavar = metavar or {int: "N", float: "X", str: "TEXT"}.get(value_type, "")
    key = key or name
    return Option(name, value_type, default, text, metavar, "FORGE_" + key.upper(), key)


def options_from_dataclass(config_type: type, names: Sequence[str]) -> tuple[Option, ...]:
    """The named fields of a dataclass: kind and default are its own, the help is its docstring."""
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
    "hash",
    "a checkpoint's folder or HuggingFace id, tiny, hash, or hash with options: hash:step_ms=2",
    "MODEL",
)
SERVER_OPTIONS = (
    define_option("host", str, "127.0.0.1", "address to listen on")._replace(
        env_var=ADDRESS_VARIABLE
    ),
    define_option("port", int, 8080, "port to listen on; 0 takes a free one")._replace(
        env_var=ADDRESS_VARIABLE
    ),
    define_option("api_key", str, None, "what clients must send; a public address needs one"),
    define_option("served_model_name", str, None, "the model's name over HTTP, if not MODEL"),
    define_option(
        "allowed_hosts",
        str,
        None,
        "names, with commas between, that requests may call the server by; * is any",
        "NAMES",
    )._replace(default_text="this machine's on 127.0.0.1, else any"),
    define_option("metrics_compat", str, None, "vllm: /metrics has the names of vLLM too", "NAME"),
)
LIMIT_OPTIONS = tuple(
    each._replace(default_text="none") if each.default is None else each
    for each in options_from_dataclass(Limits, [each.name for each in fields(Limits)])
)
GEOMETRY_NAMES = (*MAX_GEOMETRY, "depth")
"""What each model has its own defaults for."""
DEVICE_OPTIONS = options_from_dataclass(
    DeviceOptions, [each.name for each in fields(DeviceOptions)]
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
"""How tokens are proposed ahead of the model. Nobody proposes any unless one of these asks."""
RECORD_OPTION = define_option(
    "record", str, None, "file for all that decisions depend on; forge sim replay FILE", "FILE"
)
ENGINE_OPTIONS = (
    *(
        each._replace(default=None, default_text="the model's")
        if each.name in GEOMETRY_NAMES
        else each
        for each in options_from_dataclass(
            EngineConfig,
            [name for name in get_type_hints(Options) if name in get_type_hints(EngineConfig)],
        )
    ),
    *(each._replace(metavar="NAME") if each.value_type is str else each for each in DEVICE_OPTIONS),
    *SPECULATIVE_OPTIONS,
    RECORD_OPTION,
)
POLICY_OPTION = define_option(
    "policy", str, "fcfs", f"{', '.join(POLICIES)} or a FILE.py", "NAME|FILE.py"
)
SERVE_OPTIONS = (MODEL_OPTION, *SERVER_OPTIONS, *LIMIT_OPTIONS, *ENGINE_OPTIONS, POLICY_OPTION)
"""All that `forge serve` takes, and so all that an environment or a file can say."""

HELP_OVERRIDES = {
    "max_tokens": "most output tokens",
    "seed": "64-bit signed; left out, one is taken from the engine's seed and the request",
}
"""Help where that of SamplingParams speaks of None, which no flag can say."""
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
"""What `forge generate` takes beside --stop, which can be repeated. These are flags only."""

SAMPLING_FLAGS = {each.name: each.flag for each in SAMPLING_OPTIONS} | {"stop": "--stop"}
EPILOG = (
    "Each option but those of sampling is also read from the environment (--max-num-seqs from "
    "FORGE_MAX_NUM_SEQS) and from the file of --config (max_num_seqs: 8). A flag goes before the "
    f"environment, and that before the file. {ADDRESS_VARIABLE}=HOST:PORT sets --host and --port."
)


# From what was written to values.


class Settings(NamedTuple):
    """What was asked for.

    values      every option, with its default where nobody gave it
    spellings   how each was spelled, for refusals
    explicit    those that somebody gave
    """

    values: dict[str, Any]
    spellings: dict[str, str]
    explicit: frozenset[str]

    @property
    def engine_options(self) -> Options:
        """What an engine takes, as far as somebody gave it."""
        names = [each.name for each in ENGINE_OPTIONS if each.name in self.explicit]
        return cast(Options, {name: self.values[name] for name in names})

    @property
    def limits(self) -> Limits:
        """What a server allows. Raises InvalidConfig."""
        return Limits(**{each.name: self.values[each.name] for each in LIMIT_OPTIONS})

    def open_llm(self, llm_type: Callable[..., LLMType]) -> LLMType:
        """An LLM or AsyncLLM on these settings. Raises InvalidConfig."""
        return llm_type(self.values["model"], policy=self.values["policy"], **self.engine_options)


CommandFunction = Callable[[argparse.Namespace, Settings], int]


def resolve_settings(
    options: Sequence[Option], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """Each option from its flag, else the environment, else the file of --config, else its default.

    Raises InvalidConfig, naming the option as it was spelled.
    """
    path = flags.get("config")
    file_values = {} if path is None else read_config_file(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    explicit: set[str] = set()
    for option in options:
        origin = option.metavar if option.name == flags.get("positional") else option.flag
        if flags.get(option.name) is not None:
            value: OptionValue | None = parse_value(option, flags[option.name], origin)
        elif environ.get(option.env_var):
            origin = option.env_var
            value = parse_value(option, _address_part(option, environ[origin]), origin)
        elif option.file_key in file_values:
            origin = f"{option.file_key} in {path}"
            value = file_values[option.file_key]
        else:
            values[option.name], origins[option.name] = option.default, origin
            continue
        values[option.name], origins[option.name] = value, origin
        explicit.add(option.name)
    return Settings(values, origins, frozenset(explicit))


def parse_value(option: Option, text: str, origin: str) -> OptionValue:
    """The text of a flag or of the environment as a value. Raises InvalidConfig naming `origin`."""
    value: object = text
    with suppress(KeyError, ValueError):
        value = (
            BOOLEAN_WORDS[text.lower()] if option.value_type is bool else option.value_type(text)
        )
    return check_value(option, value, origin)


def check_value(option: Option, value: object, origin: str) -> OptionValue:
    """The value, which is of the option's kind. Raises InvalidConfig naming `origin`."""
    if option.value_type is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is not option.value_type:
        name, remedy = TYPE_NAMES[option.value_type]
        raise InvalidConfig(origin, f"{str(value)[:64]!r} is not {name}", remedy)
    if value == "":
        raise InvalidConfig(origin, "it is empty", "Give text, or leave it out")
    return cast(OptionValue, value)


def _address_part(option: Option, text: str) -> str:
    """What a variable says about one option: FORGE_ADDR has the host and the port."""
    if option.env_var != ADDRESS_VARIABLE:
        return text
    host, _, port = text.rpartition(":")
    if not host or not port:
        raise InvalidConfig(
            ADDRESS_VARIABLE, f"{text[:64]!r} is not HOST:PORT", "Give 127.0.0.1:8080, say"
        )
    return port if option.name == "port" else host.removeprefix("[").removesuffix("]")


def read_config_file(path: str) -> dict[str, OptionValue]:
    """The options in a YAML file.

    Raises InvalidConfig for an unknown key, one that is given twice or a value of a wrong type.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as fault:
        raise InvalidConfig(
            "--config", f"{path!r} cannot be read: {fault.strerror}", "Name a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        location = "" if mark is None else f" line {mark.line + 1}"
        raise InvalidConfig("--config", f"{path!r}{location} is not YAML", "Mend it") from None
    if values is None or document is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(
            "--config", f"{path!r} holds no options", "Write lines such as max_num_seqs: 8"
        )
    _check_unique_keys([(key.value, key.start_mark.line + 1) for key, _ in document.value], path)
    by_key = {each.file_key: each for each in SERVE_OPTIONS}
    for key, value in values.items():
        if key not in by_key:
            name, origin = str(key).replace("-", "_"), f"{str(key)[:64]} in {path}"
            if name in SAMPLING_FLAGS and name not in by_key:
                raise InvalidConfig(
                    origin,
                    "sampling is set by flags of forge generate only",
                    f"Give {SAMPLING_FLAGS[name]} there",
                )
            suggestions = closest_matches(name, list(by_key)) or by_key
            raise InvalidConfig(origin, "there is no such option", f"Use {', '.join(suggestions)}")
        values[key] = check_value(by_key[key], value, f"{key} in {path}")
    return values


def _check_unique_keys(keys: list[tuple[str, int]], path: str) -> None:
    """Raise InvalidConfig if a key of the file is on two lines: YAML would take the last."""
    first_lines: dict[str, int] = {}
    for key, line in keys:
        if key in first_lines:
            raise InvalidConfig(
                f"{key[:64]} in {path}",
                f"it is on line {first_lines[key]} and on line {line}",
                "Keep one of them",
            )
        first_lines[key] = line


def closest_matches(name: str, candidates: Sequence[str]) -> list[str]:
    """The one of `candidates` that was most likely meant, or nothing.

    One that begins as `name`, holds it or is its beginning goes before one that is spelled alike.
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


# Commands.


def describe_capacity(config: EngineConfig) -> list[str]:
    """What the cache holds, in lines."""
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    tenths = 10 * config.num_blocks // blocks_per_sequence  # rounded down: 1.0 is one that fits
    sequences = "1 sequence" if config.max_num_seqs == 1 else f"{config.max_num_seqs} sequences"
    num_cached_tokens = config.num_blocks * config.block_size
    # The last token of a sequence is never computed, so it takes no place.
    note = (
        ", so max_model_len cannot be reached"
        if num_cached_tokens + 1 < config.max_model_len
        else ""
    )
    speculation = config.speculation
    return [
        f"cache    {config.num_blocks} blocks x {config.block_size} tokens = {num_cached_tokens} "
        "tokens",
        f"batch    up to {sequences}; the cache holds {tenths // 10}.{tenths % 10} of the longest "
        f"({config.max_model_len} tokens){note}",
        *(
            [f"drafts   up to {speculation.num_tokens} a step, {speculation.acceptance}"]
            if speculation
            else ()
        ),
    ]


def format_banner(config: EngineConfig, model_name: str, url: str, api_key: str | None) -> str:
    """What the server says when it is ready."""
    body = json.dumps({"model": model_name, "prompt": "Once upon a time", "max_tokens": 32})
    # An address of all interfaces is one to listen on, not one to call.
    local_url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    line = (
        f"curl {local_url}/v1/completions -H 'content-type: application/json' -d "
        f"{shlex.quote(body)}"
    )
    if api_key is not None:  # its name, for a key is not for a log
        line += ' -H "authorization: Bearer $FORGE_API_KEY"'
    head = [f"forge {__version__} is ready", f"model    {model_name}"]
    return "\n".join([*head, *describe_capacity(config), f"address  {url}", f"try      {line}"])


def serve(args: argparse.Namespace, settings: Settings) -> int:
    """Serve a model over HTTP until Ctrl-C."""
    from forge.log import nonblocking_logging
    from forge.requirements import find_untested
    from forge.server.http_server import run_server

    with nonblocking_logging():
        logging.getLogger("forge.statistics").setLevel(logging.INFO)
        for version in find_untested():
            logging.getLogger("forge.start").warning("untested version: %s", version)
        host, port, api_key = (settings.values[name] for name in ("host", "port", "api_key"))
        model_name = settings.values["served_model_name"] or settings.values["model"]
        limits = settings.limits
        llm = settings.open_llm(AsyncLLM.spawn)
        config = llm.engine.config

        def print_banner(url: str) -> None:
            print(format_banner(config, model_name, url, api_key))

        run_server(
            llm,
            host=host,
            port=port,
            api_key=api_key,
            served_model_name=model_name,
            on_ready=print_banner,
            allowed_hosts=settings.values["allowed_hosts"],
            metrics_compat=settings.values["metrics_compat"],
            limits=limits,
        )
    return 0


def generate(args: argparse.Namespace, settings: Settings) -> int:
    """Continue a prompt on the terminal."""
    flags = [(option, getattr(args, f"sampling_{option.name}")) for option in SAMPLING_OPTIONS]
    params_given = {
        option.name: parse_value(option, text, option.flag)
        for option, text in flags
        if text is not None
    }
    params = SamplingParams(**cast(Any, params_given), stop=args.stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    with settings.open_llm(LLM) as llm:
        for delta in llm.stream(args.prompt, params):
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise RequestFailed(delta.error)
    print()
    return 0


def port_in_use(host: str, port: int, api_key: str | None) -> bool:
    """True if the address is taken now. Raises InvalidConfig where a server could never listen."""
    from forge.server.http_server import create_listener

    try:
        create_listener(host, port, api_key).close()
    except InvalidConfig as refused:
        cause = refused.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return True  # by the server that was asked about, as likely as not
        raise
    return False


def info(args: argparse.Namespace, settings: Settings) -> int:
    """Print versions, device and what would fit; takes the flags of serve."""
    from forge.requirements import find_untested, installed_version
    from forge.server.http_server import raise_file_limit

    untested_versions = ", ".join(map(str, find_untested()))
    host, port, api_key = (settings.values[name] for name in ("host", "port", "api_key"))
    # The file may be a server's.
    settings = settings._replace(explicit=settings.explicit - {RECORD_OPTION.name})
    # Limits are refused here as they would be by a server.
    raise_file_limit(settings.limits.max_connections)
    with settings.open_llm(LLM) as llm:
        in_use_note = ", in use now" if port_in_use(host, port, api_key) else ""
        print(f"forge    {__version__}")
        print(f"python   {platform.python_version()}")
        print(f"torch    {installed_version('torch') or 'not installed'}")
        print(f"versions all tested{' but ' + untested_versions if untested_versions else ''}")
        print(f"device   {llm.device}, {platform.machine()}")
        print(f"model    {settings.values['model']}")
        print("\n".join(describe_capacity(llm.engine.config)))
        print(f"address  {f'[{host}]' if ':' in host else host}:{port}{in_use_note}")
    return 0


# The parser.


class Parser(argparse.ArgumentParser):
    """Refuses in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: {_one_line(message)}. See {self.prog} --help\n")

    def reject_arguments(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with 2: these arguments mean nothing to the command."""
        name = arguments[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one argument too many")
        suggestion = closest_matches(name, re.findall(r"--[\w-]+", self.format_usage()))
        self.error(
            f"there is no option {name}{'. The nearest is ' + suggestion[0] if suggestion else ''}"
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def add_flags(parser: Parser, options: Sequence[Option], prefix: str = "") -> None:
    """One flag for each option. Its text is parsed later, as that of the environment is."""
    for option in options:
        text, dest = option.help.replace("%", "%%"), prefix + option.name
        if option.default is not None:
            text += f" (default {str(option.default).lower()})"
        elif option.default_text:
            text += f" (default: {option.default_text})"
        if option.value_type is bool:
            negative = f"--no-{option.flag[2:]}"
            parser.add_argument(option.flag, dest=dest, action="store_const", const="1", help=text)
            parser.add_argument(negative, dest=dest, action="store_const", const="0")
        else:
            parser.add_argument(option.flag, dest=dest, metavar=option.metavar, help=text)


def create_parser(argv: Sequence[str]) -> Parser:
    """The parser of `forge` for these words: `bench` and `sim` are loaded where one is named.

    What it finds has `run`, the command, `options`, those it takes, `sources`, the environment as
    far as it counts, and `parser`.
    """
    parser = Parser("forge", description="An LLM serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"forge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, run: CommandFunction, options: Sequence[Option]) -> Parser:
        subparser: Parser = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, epilog=EPILOG, allow_abbrev=False
        )
        subparser.set_defaults(run=run, options=options, sources=os.environ, parser=subparser)
        subparser.add_argument("--config", metavar="FILE.yaml", help="a file with options")
        return subparser

    for name, run in (("serve", serve), ("info", info)):
        subparser = add_command(name, run, SERVE_OPTIONS)
        subparser.add_argument(
            "model", nargs="?", metavar="MODEL", help=f"{MODEL_OPTION.help} (default hash)"
        )
        subparser.set_defaults(positional="model")
        add_flags(subparser, SERVE_OPTIONS[1:])

    subparser = add_command("generate", generate, (MODEL_OPTION, *ENGINE_OPTIONS, POLICY_OPTION))
    subparser.add_argument("prompt", help="the text to continue")
    add_flags(subparser, SAMPLING_OPTIONS, "sampling_")
    stop_help = "text that ends the output and is no part of it; can be given again"
    subparser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    sampling_names = {each.name for each in SAMPLING_OPTIONS}  # --seed is the request's
    add_flags(
        subparser,
        [
            each
            for each in (MODEL_OPTION, *ENGINE_OPTIONS, POLICY_OPTION)
            if each.name not in sampling_names
        ],
    )

    text = "Measure this machine or a server."
    bench: Parser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    if argv[:1] == ["bench"]:
        add_benchmarks(bench)
    text = "Run the engine on a virtual clock: compare policies, replay, predict."
    sim: Parser = commands.add_parser("sim", help=text, description=text, allow_abbrev=False)
    if argv[:1] == ["sim"]:
        add_simulator(sim, argv[1:])
    return parser


def add_benchmarks(bench: Parser) -> None:
    """The parser of `forge bench` has its commands. Exits with 2 where no benchmarks came along."""
    try:
        from forge.bench import commands
    except ModuleNotFoundError as missing:
        if missing.name not in ("bench", "forge.bench.commands"):
            raise
        text = "the benchmarks are not here. Run this in a clone of the repository"
        bench.exit(2, f"{bench.prog}: {text}\n")
    commands.add_subparsers(bench)


def add_simulator(sim: Parser, argv: Sequence[str]) -> None:
    """The parser of `forge sim` has what `argv` need. Exits with 2 where it did not come along."""
    try:
        from forge.sim import commands
    except ModuleNotFoundError as missing:
        if missing.name not in ("sim", "forge.sim.commands"):
            raise
        text = "the simulator is not here. Run this in a clone of the repository"
        sim.exit(2, f"{sim.prog}: {text}\n")
    commands.add_commands(sim, argv)


def main(argv: list[str] | None = None) -> int:
    """The command has run; its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    args, unknown = create_parser(arguments).parse_known_args(arguments)
    if unknown:
        args.parser.reject_arguments(unknown)
    resolved = Settings({}, {}, frozenset())
    try:
        resolved = resolve_settings(args.options, vars(args), args.sources)
        status = int(args.run(args, resolved))
        sys.stdout.flush()
        return status
    except InvalidConfig as refused:
        status, message = 2, _with_spelling(refused, refused.option, resolved.spellings)
    except InvalidRequest as refused:
        status, message = 2, _with_spelling(refused, refused.field, SAMPLING_FLAGS)
    except ForgeError as fault:
        status, message = 1, str(fault)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has left; say nothing, now or at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"{args.parser.prog}: {_one_line(message)}", file=sys.stderr)
    return status


def _with_spelling(error: ForgeError, name: str, origins: Mapping[str, str]) -> str:
    """The refusal, with the name of what it refuses as the user wrote it."""
    return origins.get(name, name) + str(error).removeprefix(name)
