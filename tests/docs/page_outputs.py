"""Writes under each python block of a page what the block prints.

    python -m tests.docs.page_outputs wiki/Paging.md wiki/Seam.md

The output of a sh block is rewritten only where the page shows one. Prose between a block and a
text block makes the text block something else, which is left alone.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.docs.pages import Block, ForkServer, comparable, run_blocks, shown_outputs


def with_outputs(text: str, printed: dict[Block, str]) -> str:
    """Return the text of a page with what its blocks printed."""
    lines, shown = text.splitlines(keepends=True), shown_outputs(text)
    # From the end, so that the lines before keep their numbers.
    for block in reversed(printed):
        after = shown.get(block)
        if block.language != "python" and after is None:
            continue
        fence = lines[block.line - 2]
        indent = fence[: len(fence) - len(fence.lstrip())]
        output = comparable(printed[block])
        new = ["", "```text", *output.splitlines(), "```"] if output else []
        lines[block.end : after.end if after else block.end] = [
            f"{indent}{line}".rstrip() + "\n" for line in new
        ]
    return "".join(lines)


def main(names: list[str]) -> None:
    with TemporaryDirectory() as folder, closing(ForkServer(Path(folder))) as forks:
        for page in map(Path, names):
            printed = run_blocks(page, forks)
            page.write_text(with_outputs(page.read_text("utf-8"), printed), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
