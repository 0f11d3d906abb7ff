"""The first screen of README.md: short, and its answer is the one that the server gives."""

from __future__ import annotations

import json
import re

from forge import LLM, SamplingParams
from tests.docs.pages import ROOT, parse_blocks

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_FIRST_SCREEN_LINES = 45


def test_the_two_commands_are_on_the_first_screen() -> None:
    """A picture, four things to do and the commands."""
    end = TEXT.index("make test ")
    screen = TEXT[:end]
    assert screen.count("\n") < MAX_FIRST_SCREEN_LINES
    assert "make serve" in screen and "(wiki/film.png)" in screen
    assert len(re.findall(r"^\| \*\*\w+\*\*", screen, re.MULTILINE)) == 4


def test_the_answer_shown_is_that_of_the_request_shown() -> None:
    blocks = parse_blocks(TEXT)
    position = next(n for n, block in enumerate(blocks) if block.text.startswith("curl "))
    found = re.search(r"-d '(\{.*\})'", blocks[position].text)
    assert found
    body = json.loads(found[1])
    params = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"])
    with LLM(body["model"]) as llm:
        (output,) = llm.generate([body["prompt"]], params)
    assert body["prompt"] + output.text == blocks[position + 1].text.rstrip("\n")
