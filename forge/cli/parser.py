"""argparse with errors of one line, and flags made from options.

Owns how an option becomes a flag. A flag's text is parsed by forge.cli.settings, as the environment
is, so that both give the same errors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from forge.cli.options import Option, closest_matches
from forge.cli.settings import Settings
from forge.cli.vllm_options import vllm_remedy

CommandFunction = Callable[[argparse.Namespace, Settings], int]


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {collapse_whitespace(message)}. See {self.prog} --help\n")

    def reject_arguments(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with status 2 because of unknown arguments, and say what to do about the first.

        That is the remedy of an option of vLLM, or the nearest known option.
        """
        name = arguments[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one argument too many")
        suggestions = closest_matches(name, re.findall(r"--[\w-]+", self.format_usage()))
        remedy = vllm_remedy(name) or "".join(f"The nearest is {each}" for each in suggestions)
        self.error(f"there is no option {name}{'. ' + remedy if remedy else ''}")


def collapse_whitespace(text: str) -> str:
    """Return the text on one line, with single spaces."""
    return " ".join(text.split())


def add_flags(parser: Parser, options: Sequence[Option], prefix: str = "") -> None:
    """Add a flag for each option. Its value stays text until resolve_settings parses it."""
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
            action = "append" if option.value_type is tuple else "store"
            parser.add_argument(
                option.flag, dest=dest, action=action, metavar=option.metavar, help=text
            )
