"""The entry point of `forge`: parse the words, run the command, turn errors into exit statuses.

Owns the parser of all commands and the exit status. `forge bench`, `forge sim` and `forge learn`
are imported only where one of them is the command, and a command has flags only where it is named.
So `forge --help` stays quick.

    words ──► create_parser ──► resolve_settings ──► command ──► 0
                   │ usage            │ InvalidConfig   │ ForgeError
                   └──────── 2 ───────┘                 └─► 1

Exit status: 0 success, 1 failure while running, 2 invalid options, 130 Ctrl-C. An error is one line
on standard error: it spells the option as the user did, and says what to change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from forge import __version__
from forge.cli.commands import generate, info, serve
from forge.cli.options import (
    ADDRESS_VARIABLE,
    ENGINE_OPTIONS,
    MODEL_OPTION,
    POLICY_OPTION,
    SAMPLING_FLAGS,
    SAMPLING_OPTIONS,
    SERVE_OPTIONS,
    Option,
)
from forge.cli.parser import CommandFunction, Parser, add_flags, collapse_whitespace
from forge.cli.settings import Settings, resolve_settings
from forge.errors import ForgeError, InvalidConfig, InvalidRequest

EPILOG = (
    "Each option but those of sampling is also read from the environment (--max-num-seqs from "
    "FORGE_MAX_NUM_SEQS) and from the file of --config (max_num_seqs: 8). A flag goes before the "
    f"environment, and that before the file. {ADDRESS_VARIABLE}=HOST:PORT sets --host and --port."
)


def create_parser(argv: Sequence[str]) -> Parser:
    """Return the parser of `forge`, with the flags of the command that `argv` names.

    The namespace that it returns has these besides the values of flags:

    run       the command
    options   the options that the command takes
    sources   environment variables that may set them
    parser    the parser of the command
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
            "model",
            nargs="?",
            metavar="MODEL",
            help=f"{MODEL_OPTION.help} (default {MODEL_OPTION.default})",
        )
        subparser.set_defaults(positional="model")
        if name in argv:
            add_flags(subparser, SERVE_OPTIONS[1:])

    subparser = add_command("generate", generate, (MODEL_OPTION, *ENGINE_OPTIONS, POLICY_OPTION))
    if "generate" in argv:
        _add_generate_arguments(subparser)

    text = "Measure this machine or a server."
    bench: Parser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    if argv[:1] == ["bench"]:
        from forge.bench.commands import add_subparsers

        add_subparsers(bench)
    text = "Run the engine on a virtual clock: compare policies, replay, predict."
    sim: Parser = commands.add_parser("sim", help=text, description=text, allow_abbrev=False)
    if argv[:1] == ["sim"]:
        from forge.sim.commands import add_commands

        add_commands(sim, argv[1:])
    text = "Learn how serving works: exercises that check themselves."
    learn: Parser = commands.add_parser("learn", help=text, description=text, allow_abbrev=False)
    if argv[:1] == ["learn"]:
        from forge.learn.command import add_arguments

        add_arguments(learn)
    return parser


def _add_generate_arguments(parser: Parser) -> None:
    parser.add_argument("prompt", help="the text to continue")
    add_flags(parser, SAMPLING_OPTIONS, "sampling_")
    stop_help = "text that ends the output and is no part of it; can be given again"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    sampling_names = {each.name for each in SAMPLING_OPTIONS}  # --seed is the request's
    engine_options = (MODEL_OPTION, *ENGINE_OPTIONS, POLICY_OPTION)
    add_flags(parser, [each for each in engine_options if each.name not in sampling_names])


def main(argv: list[str] | None = None) -> int:
    """Run the command of these words, of sys.argv by default, and return its exit status."""
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
    except InvalidConfig as error:
        status, message = 2, _with_spelling(error, error.option, resolved.spellings)
    except InvalidRequest as error:
        status, message = 2, _with_spelling(error, error.field, SAMPLING_FLAGS)
    except ForgeError as error:
        status, message = 1, str(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone: print nothing more, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"{args.parser.prog}: {collapse_whitespace(message)}", file=sys.stderr)
    return status


def _with_spelling(error: ForgeError, name: str, origins: Mapping[str, str]) -> str:
    """Return the error's text, with the option or field spelled as the user spelled it."""
    return origins.get(name, name) + str(error).removeprefix(name)


if __name__ == "__main__":
    sys.exit(main())
