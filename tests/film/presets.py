"""Presets: the films and frames of wiki/Film.md, and what the engine did there.

Owns the commands, the addresses and the answers. A test compares each answer with the engine's
plans, with the page in a browser, and with the text of wiki/Film.md.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from forge.cli.main import create_parser
from forge.cli.settings import resolve_settings
from forge.film.page import build_page
from forge.film.state import Line
from forge.sim.film_command import film_scenario, second_scenario
from forge.sim.run_options import create_scenario


class FilmRun(NamedTuple):
    """A command of `forge sim --html`, without its file, and the options of the run next to it."""

    words: str
    versus: str = ""

    def command(self, page: str) -> str:
        """Return the command that writes the page, as wiki/Film.md has it."""
        versus = f' --versus "{self.versus}"' if self.versus else ""
        return f"forge sim {self.words} --html {page}{versus}"


class Preset(NamedTuple):
    """A frame of a film, and a text of the answer.

    film    name of the page, a key of FILMS
    seq     chosen sequence, or None
    says    part of the status line
    waits   reason for which `seq` waits
    key     pressed at `at`; it leads to frame `to`
    """

    film: str
    at: int
    seq: int | None
    says: str = ""
    waits: str = ""
    key: str = ""
    to: int = 0

    @property
    def address(self) -> str:
        """The deep link."""
        chosen = "" if self.seq is None else f"&seq={self.seq}"
        return f"{self.film}.html#at={self.at}{chosen}"

    @property
    def frame(self) -> int:
        """Frame whose status has the answer."""
        return self.to if self.key else self.at


FILMS = {
    "two": FilmRun(
        "--workload closed --clients 2 --requests 3 --prompt 8 --output 13 --num-blocks 8 "
        "--block-size 4 --max-num-seqs 4 --max-num-batched-tokens 6 --cost unit"
    ),
    "thrash": FilmRun("--num-blocks 160 --prompt 16-64 --output 200-400 --rate 12 --requests 120"),
    "agents": FilmRun(
        "--workload agent --clients 3 --requests 12 --turns 4 --system 64 --prompt 16-32 "
        "--output 16 --num-blocks 40"
    ),
    "budget": FilmRun(
        "--rate 12 --requests 60 --prompt 512-2048 --output 64-128 --num-blocks 4096 "
        "--max-num-batched-tokens 256",
        "max-num-batched-tokens=2048",
    ),
    "drafts": FilmRun(
        "--num-speculative-tokens 4 --agreement 0.6 --rate 4 --requests 8 --prompt 32-64 "
        "--output 40"
    ),
    "depth": FilmRun(
        "--cost roofline:h200,qwen3-4b --rate 20 --requests 10 --prompt 64 --output 20", "depth=2"
    ),
    "line": FilmRun(
        "--num-blocks 400 --prompt 32-96,32-96,32-96,32-96,32-96,32-96,32-96,4000 --output 100 "
        "--rate 12 --requests 200",
        "policy=shortest-prompt",
    ),
}

PRESETS = (
    Preset("thrash", 490, 24, waits="4 blocks needed, 1 kept, 0 free"),
    Preset("two", 10, 1, "1 preempted: 1 block needed, 0 free"),
    Preset("two", 14, 1, "1 admitted: resumed, 12 tokens shared"),
    Preset("thrash", 491, 23, "23 admitted: resumed, 0 tokens shared", key="m", to=509),
    Preset("agents", 0, 1, waits="another sequence computes the next block of its prefix"),
    Preset("agents", 1, 1, "4 admitted: new, 64 tokens shared"),
    Preset("budget", 48, 4, "4 admitted: new, 0 tokens shared"),
    Preset("thrash", 488, None, "evicted: block 120", key="e", to=490),
    Preset("drafts", 10, 0, "0 keeps 0 drafts"),
    Preset("line", 608, 28, waits="250 blocks needed, 1 kept, 145 free"),
)


def film_run(name: str) -> list[list[Line]]:
    """Return the film of a run, and that of the run next to it."""
    run = FILMS[name]
    words = ["sim", *shlex.split(run.words), "--html", "x"]
    words += ["--versus", run.versus] if run.versus else []
    args, unknown = create_parser(words).parse_known_args(words)
    assert not unknown
    settings = resolve_settings(args.options, vars(args), {})
    films = [film_scenario(create_scenario(settings.values, settings.explicit), "the run")]
    second = second_scenario(settings.values, settings.explicit)
    if second is not None:
        films.append(film_scenario(second[1], f"the same arrivals with {second[0]}"))
    return films


def film_page(name: str) -> str:
    """Return the page of a run, with what its presets say for the self-test."""
    presets = [
        {
            "at": each.at,
            **({} if each.seq is None else {"seq": each.seq}),
            **({"key": each.key, "to": each.to} if each.key else {}),
            **({"waits": [each.seq, each.waits]} if each.waits else {"says": each.says}),
        }
        for each in PRESETS
        if each.film == name
    ]
    return build_page(film_run(name), name, {"presets": presets})
