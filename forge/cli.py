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
from forge.config import MOST, DeviceOptions, EngineConfig
from forge.errors import ForgeError, InvalidConfig, InvalidRequest, RequestFailed
from forge.limits import Limits
from forge.llm import LLM, Options
from forge.policy import POLICIES
from forge.request import SamplingParams

Value = bool | int | float | str
Opened = TypeVar("Opened", LLM, AsyncLLM)

KINDS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "Give one of them"),
    int: ("an integer", "Give a whole number"),
    float: ("a number", "Give a number"),
    str: ("text", "Give text, in quotes in a file"),
}
"""How a refusal names each kind of value, and the remedy."""

WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""What true and false are called in the environment."""

ADDRESS = "FORGE_ADDR"
"""HOST:PORT. There is no FORGE_PORT: Kubernetes writes that name for a service called forge."""


class Option(NamedTuple):
    """One thing that can be set. `name` is its keyword in Python.

    unset   what holds where nobody sets it and it has no default, in words
    key     its name in a file and, with dashes, on the command line
    """

    name: str
    kind: type
    default: Value | None
    help: str
    metavar: str
    variable: str
    key: str
    unset: str = ""

    @property
    def flag(self) -> str:
        """How it is spelled on the command line."""
        return "--" + self.key.replace("_", "-")


def option(
    name: str, kind: type, default: Value | None, text: str, metavar: str = "", key: str = ""
) -> Option:
    """An option whose name elsewhere follows from its own, or from `key`."""
    metavar = metavar or {int: "N", float: "X", str: "TEXT"}.get(kind, "")
    key = key or name
    return Option(name, kind, default, text, metavar, "FORGE_" + key.upper(), key)


def options_of(owner: type, names: Sequence[str]) -> tuple[Option, ...]:
    """The named fields of a dataclass: kind and default are its own, the help is its docstring."""
    lines = re.findall(r"^    (\w+) {2,}(\S.*(?:\n {20,}.*)*)", owner.__doc__ or "", re.MULTILINE)
    helps = {name: " ".join(text.split()) for name, text in lines}
    hints = get_type_hints(owner)
    defaults = {each.name: cast(Value | None, each.default) for each in fields(owner)}
    kinds = {name: next(k for k in KINDS if hints[name] in (k, k | None)) for name in names}
    return tuple(option(n, kinds[n], defaults[n], helps.get(n, "")) for n in names)


MODEL = option(
    "model",
    str,
    "hash",
    "a checkpoint's folder or HuggingFace id, tiny, hash, or hash with options: hash:step_ms=2",
    "MODEL",
)
SERVER = (
    option("host", str, "127.0.0.1", "address to listen on")._replace(variable=ADDRESS),
    option("port", int, 8080, "port to listen on; 0 takes a free one")._replace(variable=ADDRESS),
    option("api_key", str, None, "what clients must send; a public address needs one"),
    option("served_model_name", str, None, "the model's name over HTTP, if not MODEL"),
    option(
        "allowed_hosts",
        str,
        None,
        "names, with commas between, that requests may call the server by; * is any",
        "NAMES",
    )._replace(unset="this machine's on 127.0.0.1, else any"),
    option("metrics_compat", str, None, "vllm: /metrics has the names of vLLM too", "NAME"),
)
LIMITS = tuple(
    each._replace(unset="none") if each.default is None else each
    for each in options_of(Limits, [each.name for each in fields(Limits)])
)
GEOMETRY = (*MOST, "depth")
"""What each model has its own defaults for."""
DEVICE = options_of(DeviceOptions, [each.name for each in fields(DeviceOptions)])
SPECULATION = (
    option(
        "draft_model",
        str,
        None,
        "a smaller model that proposes tokens ahead of MODEL, which verifies them",
        "MODEL",
        "speculative_model",
    ),
    option("num_speculative_tokens", int, None, "most tokens proposed at once, 1 to 16")._replace(
        unset="4"
    ),
    option(
        "speculative_method",
        str,
        None,
        "draft: a second model proposes; ngram: what followed the same tokens before",
        "NAME",
    )._replace(unset="draft"),
    option(
        "acceptance",
        str,
        None,
        "coupled: token for token the output without drafts; rejection: more drafts are accepted, "
        "and the output is another of the same distribution",
        "NAME",
    )._replace(unset="coupled"),
)
"""How tokens are proposed ahead of the model. Nobody proposes any unless one of these asks."""
RECORD = option(
    "record", str, None, "file for all that decisions depend on; forge sim replay FILE", "FILE"
)
ENGINE = (
    *(
        each._replace(default=None, unset="the model's") if each.name in GEOMETRY else each
        for each in options_of(
            EngineConfig,
            [name for name in get_type_hints(Options) if name in get_type_hints(EngineConfig)],
        )
    ),
    *(each._replace(metavar="NAME") if each.kind is str else each for each in DEVICE),
    *SPECULATION,
    RECORD,
)
POLICY = option("policy", str, "fcfs", f"{', '.join(POLICIES)} or a FILE.py", "NAME|FILE.py")
OPTIONS = (MODEL, *SERVER, *LIMITS, *ENGINE, POLICY)
"""All that `forge serve` takes, and so all that an environment or a file can say."""

WORDED = {
    "max_tokens": "most output tokens",
    "seed": "64-bit signed; left out, one is taken from the engine's seed and the request",
}
"""Help where that of SamplingParams speaks of None, which no flag can say."""
SAMPLING = tuple(
    each._replace(help=WORDED.get(each.name, each.help))
    for each in options_of(
        SamplingParams,
        (
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
        ),
    )
)
"""What `forge generate` takes beside --stop, which can be repeated. These are flags only."""

REQUEST_ORIGINS = {each.name: each.flag for each in SAMPLING} | {"stop": "--stop"}
EPILOG = (
    "Each option but those of sampling is also read from the environment (--max-num-seqs from "
    "FORGE_MAX_NUM_SEQS) and from the file of --config (max_num_seqs: 8). A flag goes before the "
    f"environment, and that before the file. {ADDRESS}=HOST:PORT sets --host and --port."
)


# From what was written to values.


class Settings(NamedTuple):
    """What was asked for.

    values    every option, with its default where nobody gave it
    origins   how each was spelled, for refusals
    given     those that somebody gave
    """

    values: dict[str, Any]
    origins: dict[str, str]
    given: frozenset[str]

    @property
    def engine(self) -> Options:
        """What an engine takes, as far as somebody gave it."""
        names = [each.name for each in ENGINE if each.name in self.given]
        return cast(Options, {name: self.values[name] for name in names})

    @property
    def limits(self) -> Limits:
        """What a server allows. Raises InvalidConfig."""
        return Limits(**{each.name: self.values[each.name] for each in LIMITS})

    def open(self, kind: Callable[..., Opened]) -> Opened:
        """An LLM or AsyncLLM on these settings. Raises InvalidConfig."""
        return kind(self.values["model"], policy=self.values["policy"], **self.engine)


Command = Callable[[argparse.Namespace, Settings], int]


def settings(
    options: Sequence[Option], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """Each option from its flag, else the environment, else the file of --config, else its default.

    Raises InvalidConfig, naming the option as it was spelled.
    """
    path = flags.get("config")
    stored = {} if path is None else stored_options(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    given: set[str] = set()
    for each in options:
        origin = each.metavar if each.name == flags.get("positional") else each.flag
        if flags.get(each.name) is not None:
            value: Value | None = parsed(each, flags[each.name], origin)
        elif environ.get(each.variable):
            origin = each.variable
            value = parsed(each, _part(each, environ[origin]), origin)
        elif each.key in stored:
            origin = f"{each.key} in {path}"
            value = stored[each.key]
        else:
            values[each.name], origins[each.name] = each.default, origin
            continue
        values[each.name], origins[each.name] = value, origin
        given.add(each.name)
    return Settings(values, origins, frozenset(given))


def parsed(option: Option, text: str, origin: str) -> Value:
    """The text of a flag or of the environment as a value. Raises InvalidConfig naming `origin`."""
    value: object = text
    with suppress(KeyError, ValueError):
        value = WORDS[text.lower()] if option.kind is bool else option.kind(text)
    return checked(option, value, origin)


def checked(option: Option, value: object, origin: str) -> Value:
    """The value, which is of the option's kind. Raises InvalidConfig naming `origin`."""
    if option.kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is not option.kind:
        name, remedy = KINDS[option.kind]
        raise InvalidConfig(origin, f"{str(value)[:64]!r} is not {name}", remedy)
    if value == "":
        raise InvalidConfig(origin, "it is empty", "Give text, or leave it out")
    return cast(Value, value)


def _part(option: Option, text: str) -> str:
    """What a variable says about one option: FORGE_ADDR has the host and the port."""
    if option.variable != ADDRESS:
        return text
    host, _, port = text.rpartition(":")
    if not host or not port:
        raise InvalidConfig(ADDRESS, f"{text[:64]!r} is not HOST:PORT", "Give 127.0.0.1:8080, say")
    return port if option.name == "port" else host.removeprefix("[").removesuffix("]")


def stored_options(path: str) -> dict[str, Value]:
    """The options in a YAML file.

    Raises InvalidConfig for an unknown key, one that is given twice or a value of a wrong type.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        written = yaml.compose(text, yaml.SafeLoader)
        stored = yaml.safe_load(text)
    except OSError as fault:
        raise InvalidConfig(
            "--config", f"{path!r} cannot be read: {fault.strerror}", "Name a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        where = "" if mark is None else f" line {mark.line + 1}"
        raise InvalidConfig("--config", f"{path!r}{where} is not YAML", "Mend it") from None
    if stored is None or written is None:
        return {}
    if not isinstance(stored, dict):
        raise InvalidConfig(
            "--config", f"{path!r} holds no options", "Write lines such as max_num_seqs: 8"
        )
    _check_given_once([(key.value, key.start_mark.line + 1) for key, _ in written.value], path)
    known = {each.key: each for each in OPTIONS}
    for key, value in stored.items():
        if key not in known:
            name, origin = str(key).replace("-", "_"), f"{str(key)[:64]} in {path}"
            if name in REQUEST_ORIGINS and name not in known:
                raise InvalidConfig(
                    origin,
                    "sampling is set by flags of forge generate only",
                    f"Give {REQUEST_ORIGINS[name]} there",
                )
            close = nearest(name, list(known)) or known
            raise InvalidConfig(origin, "there is no such option", f"Use {', '.join(close)}")
        stored[key] = checked(known[key], value, f"{key} in {path}")
    return stored


def _check_given_once(keys: list[tuple[str, int]], path: str) -> None:
    """Raise InvalidConfig if a key of the file is on two lines: YAML would take the last."""
    lines: dict[str, int] = {}
    for key, line in keys:
        if key in lines:
            raise InvalidConfig(
                f"{key[:64]} in {path}",
                f"it is on line {lines[key]} and on line {line}",
                "Keep one of them",
            )
        lines[key] = line


def nearest(given: str, known: Sequence[str]) -> list[str]:
    """The one of `known` that was most likely meant, or nothing.

    One that begins as `given`, holds it or is its beginning goes before one that is spelled alike.
    """
    bare = given.strip("-")
    akin = (
        [each for each in known if each.startswith(given)]
        or [each for each in known if bare in each]
        or [each for each in known if given.startswith(each)]
    )
    if akin and len(bare) > 1:
        return difflib.get_close_matches(given, akin, 1, 0.0)
    return difflib.get_close_matches(given, known, 1)


# Commands.


def fits(config: EngineConfig) -> list[str]:
    """What the cache holds, in lines."""
    longest = -(-config.max_model_len // config.block_size)
    tenths = 10 * config.num_blocks // longest  # rounded down: 1.0 is one that fits
    sequences = "1 sequence" if config.max_num_seqs == 1 else f"{config.max_num_seqs} sequences"
    held = config.num_blocks * config.block_size
    # The last token of a sequence is never computed, so it takes no place.
    short = ", so max_model_len cannot be reached" if held + 1 < config.max_model_len else ""
    drafts = config.speculation
    return [
        f"cache    {config.num_blocks} blocks x {config.block_size} tokens = {held} tokens",
        f"batch    up to {sequences}; the cache holds {tenths // 10}.{tenths % 10} of the longest "
        f"({config.max_model_len} tokens){short}",
        *([f"drafts   up to {drafts.num_tokens} a step, {drafts.acceptance}"] if drafts else ()),
    ]


def banner(config: EngineConfig, served: str, url: str, api_key: str | None) -> str:
    """What the server says when it is ready."""
    body = json.dumps({"model": served, "prompt": "Once upon a time", "max_tokens": 32})
    # An address of all interfaces is one to listen on, not one to call.
    near = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    line = f"curl {near}/v1/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    if api_key is not None:  # its name, for a key is not for a log
        line += ' -H "authorization: Bearer $FORGE_API_KEY"'
    head = [f"forge {__version__} is ready", f"model    {served}"]
    return "\n".join([*head, *fits(config), f"address  {url}", f"try      {line}"])


def serve(args: argparse.Namespace, chosen: Settings) -> int:
    """Serve a model over HTTP until Ctrl-C."""
    from forge.log import write_plainly
    from forge.requirements import untested
    from forge.server.serve import run

    with write_plainly():
        logging.getLogger("forge.statistics").setLevel(logging.INFO)
        for each in untested():
            logging.getLogger("forge.start").warning("untested version: %s", each)
        host, port, api_key = (chosen.values[name] for name in ("host", "port", "api_key"))
        served = chosen.values["served_model_name"] or chosen.values["model"]
        limits = chosen.limits
        llm = chosen.open(AsyncLLM.apart)
        config = llm.engine.config

        def ready(url: str) -> None:
            print(banner(config, served, url, api_key))

        run(
            llm,
            host=host,
            port=port,
            api_key=api_key,
            served_model_name=served,
            on_ready=ready,
            allowed_hosts=chosen.values["allowed_hosts"],
            metrics_compat=chosen.values["metrics_compat"],
            limits=limits,
        )
    return 0


def generate(args: argparse.Namespace, chosen: Settings) -> int:
    """Continue a prompt on the terminal."""
    given = [(each, getattr(args, f"sampling_{each.name}")) for each in SAMPLING]
    asked = {each.name: parsed(each, text, each.flag) for each, text in given if text is not None}
    params = SamplingParams(**cast(Any, asked), stop=args.stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    with chosen.open(LLM) as llm:
        for delta in llm.stream(args.prompt, params):
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise RequestFailed(delta.error)
    print()
    return 0


def port_in_use(host: str, port: int, api_key: str | None) -> bool:
    """True if the address is taken now. Raises InvalidConfig where a server could never listen."""
    from forge.server.serve import listener

    try:
        listener(host, port, api_key).close()
    except InvalidConfig as refused:
        fault = refused.__context__
        if isinstance(fault, OSError) and fault.errno == errno.EADDRINUSE:
            return True  # by the server that was asked about, as likely as not
        raise
    return False


def info(args: argparse.Namespace, chosen: Settings) -> int:
    """Print versions, device and what would fit; takes the flags of serve."""
    from forge.requirements import installed_version, untested
    from forge.server.serve import make_room

    outside = ", ".join(map(str, untested()))
    host, port, api_key = (chosen.values[name] for name in ("host", "port", "api_key"))
    chosen = chosen._replace(given=chosen.given - {RECORD.name})  # the file may be a server's
    make_room(chosen.limits.max_connections)  # limits are refused here as they would be by a server
    with chosen.open(LLM) as llm:
        taken = ", in use now" if port_in_use(host, port, api_key) else ""
        print(f"forge    {__version__}")
        print(f"python   {platform.python_version()}")
        print(f"torch    {installed_version('torch') or 'not installed'}")
        print(f"versions all tested{' but ' + outside if outside else ''}")
        print(f"device   {llm.device}, {platform.machine()}")
        print(f"model    {chosen.values['model']}")
        print("\n".join(fits(llm.engine.config)))
        print(f"address  {f'[{host}]' if ':' in host else host}:{port}{taken}")
    return 0


# The parser.


class Parser(argparse.ArgumentParser):
    """Refuses in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: {_one_line(message)}. See {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with 2: these arguments mean nothing to the command."""
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one argument too many")
        close = nearest(name, re.findall(r"--[\w-]+", self.format_usage()))
        self.error(f"there is no option {name}{'. The nearest is ' + close[0] if close else ''}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def add_flags(parser: Parser, options: Sequence[Option], prefix: str = "") -> None:
    """One flag for each option. Its text is parsed later, as that of the environment is."""
    for each in options:
        text, dest = each.help.replace("%", "%%"), prefix + each.name
        if each.default is not None:
            text += f" (default {str(each.default).lower()})"
        elif each.unset:
            text += f" (default: {each.unset})"
        if each.kind is bool:
            negative = f"--no-{each.flag[2:]}"
            parser.add_argument(each.flag, dest=dest, action="store_const", const="1", help=text)
            parser.add_argument(negative, dest=dest, action="store_const", const="0")
        else:
            parser.add_argument(each.flag, dest=dest, metavar=each.metavar, help=text)


def command_line(words: Sequence[str]) -> Parser:
    """The parser of `forge` for these words: `bench` and `sim` are loaded where one is named.

    What it finds has `run`, the command, `options`, those it takes, `sources`, the environment as
    far as it counts, and `parser`.
    """
    parser = Parser("forge", description="An LLM serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"forge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Command, options: Sequence[Option]) -> Parser:
        made: Parser = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, epilog=EPILOG, allow_abbrev=False
        )
        made.set_defaults(run=run, options=options, sources=os.environ, parser=made)
        made.add_argument("--config", metavar="FILE.yaml", help="a file with options")
        return made

    for name, run in (("serve", serve), ("info", info)):
        made = command(name, run, OPTIONS)
        made.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL.help} (default hash)")
        made.set_defaults(positional="model")
        add_flags(made, OPTIONS[1:])

    made = command("generate", generate, (MODEL, *ENGINE, POLICY))
    made.add_argument("prompt", help="the text to continue")
    add_flags(made, SAMPLING, "sampling_")
    stop_help = "text that ends the output and is no part of it; can be given again"
    made.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    taken = {each.name for each in SAMPLING}  # --seed is the request's
    add_flags(made, [each for each in (MODEL, *ENGINE, POLICY) if each.name not in taken])

    text = "Measure this machine or a server."
    bench: Parser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    if words[:1] == ["bench"]:
        add_benchmarks(bench)
    text = "Run the engine on a virtual clock: compare policies, replay, predict."
    sim: Parser = commands.add_parser("sim", help=text, description=text, allow_abbrev=False)
    if words[:1] == ["sim"]:
        add_simulator(sim, words[1:])
    return parser


def add_benchmarks(bench: Parser) -> None:
    """The parser of `forge bench` has its commands. Exits with 2 where no benchmarks came along."""
    try:
        from bench import commands
    except ModuleNotFoundError as missing:
        if missing.name not in ("bench", "bench.commands"):
            raise
        text = "the benchmarks are not here. Run this in a clone of the repository"
        bench.exit(2, f"{bench.prog}: {text}\n")
    commands.add(bench)


def add_simulator(sim: Parser, words: Sequence[str]) -> None:
    """The parser of `forge sim` has what `words` need. Exits with 2 where it did not come along."""
    try:
        from sim import commands
    except ModuleNotFoundError as missing:
        if missing.name not in ("sim", "sim.commands"):
            raise
        text = "the simulator is not here. Run this in a clone of the repository"
        sim.exit(2, f"{sim.prog}: {text}\n")
    commands.add(sim, words)


def main(argv: list[str] | None = None) -> int:
    """The command has run; its exit status."""
    words = sys.argv[1:] if argv is None else argv
    args, unknown = command_line(words).parse_known_args(words)
    if unknown:
        args.parser.refuse(unknown)
    chosen = Settings({}, {}, frozenset())
    try:
        chosen = settings(args.options, vars(args), args.sources)
        status = int(args.run(args, chosen))
        sys.stdout.flush()
        return status
    except InvalidConfig as refused:
        status, message = 2, _respelled(refused, refused.option, chosen.origins)
    except InvalidRequest as refused:
        status, message = 2, _respelled(refused, refused.field, REQUEST_ORIGINS)
    except ForgeError as fault:
        status, message = 1, str(fault)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has left; say nothing, now or at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"{args.parser.prog}: {_one_line(message)}", file=sys.stderr)
    return status


def _respelled(refused: ForgeError, name: str, origins: Mapping[str, str]) -> str:
    """The refusal, with the name of what it refuses as the user wrote it."""
    return origins.get(name, name) + str(refused).removeprefix(name)
