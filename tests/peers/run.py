"""Run the OpenAI-server tests of vLLM and SGLang against forge, and compare with the lists.

    python -m tests.peers.run vllm [FILE ...]
    python -m tests.peers.run sglang --sglang-source FOLDER [FILE ...]
    python -m tests.peers.run vllm --write-page

Owns the environment in .venv-peers/, the sources and the table of docs/Peer-tests.md. Knows no
test: the plugins start forge for them, and vllm.toml and sglang.toml say which pass.

    source archive of a release ── sha256 ──► .venv-peers/vllm-0.33.0/    ┐
    folder of a git checkout    ── sha256 ──► the tests where they are    ┴─► pytest ──► outcomes
                                                                                 │
    forge serve on made-up weights and the real tokenizers  ◄────────────────────┘

Only pip uses a network. Nothing of the peers is part of this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.peers.expected import NOT_APPLICABLE, PASSES, Total, compare, count, find_faults
from tests.peers.expected import read_expected as read_list

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "env" / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"
PAGE = ROOT / "docs" / "Peer-tests.md"
RUN_LIMIT_S = 3600.0

VLLM = "vllm-0.33.0"
VLLM_SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
# The package, which the tests import, its chat templates and the tests of the server. The tests'
# own conftest.py and utils.py start vLLM, and vllm_plugin.py takes their place.
VLLM_PARTS = ("vllm/", "examples/", "tests/__init__.py", "tests/entrypoints/", "tests/tool_use/")


class Peer(NamedTuple):
    """A peer's tests.

    files   files and folders of tests, relative to the source
    """

    name: str
    version: str
    files: tuple[str, ...]


PEERS = {
    "vllm": Peer(
        "vllm",
        "0.33.0",
        (
            "tests/entrypoints/openai/chat_completion",
            "tests/entrypoints/openai/completion/test_completion.py",
            "tests/entrypoints/openai/completion/test_prompt_validation.py",
            "tests/entrypoints/openai/models",
            "tests/entrypoints/openai/responses",
            "tests/entrypoints/openai/test_chunked_prompt.py",
            "tests/entrypoints/openai/test_return_token_ids.py",
            "tests/entrypoints/openai/test_return_tokens_as_ids.py",
            "tests/entrypoints/anthropic/test_messages.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
            "tests/entrypoints/serve/tokenize/test_tokenization.py",
            "tests/entrypoints/tool_parsers",
            "tests/tool_use",
        ),
    ),
    "sglang": Peer(
        "sglang",
        "commit 3c69a4c744525be0146629fc5933e3ddab609fb2",
        ("test/registered/openai_server",),
    ),
}
# Of the files above and of sglang.test.kits, by `source_sha256`.
SGLANG_SHA256 = "2b9d18f802ad390df17437d43ae376707a81906dc0cb6fa905eee0ed24bd498f"


def install() -> None:
    """Make the environment, again if the requirements change."""
    stamp = FOLDER / "installed.txt"
    wanted = sys.version + REQUIREMENTS.read_text("utf-8")
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    print(f"installing tests/peers/requirements.txt into {PYTHON.parent.parent}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER / "env")], check=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # Two steps: some packages require older versions than forge of what the tests do not use.
    first, second = REQUIREMENTS.read_text("utf-8").split("# --no-deps\n")
    for text, options in ((first, ()), (second, ("--no-deps",))):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            subprocess.run([*pip, *options, "-r", file.name], check=True)
    stamp.write_text(wanted, "utf-8")


def vllm_source() -> Path:
    """Return the folder of vLLM's release, which is downloaded and unpacked once."""
    folder = FOLDER / VLLM
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        pinned = Path(scratch) / "pinned.txt"
        pinned.write_text(f"{VLLM.replace('-', '==')} --hash=sha256:{VLLM_SHA256}\n", "utf-8")
        print(f"downloading {VLLM}", flush=True)
        # pip reads the archive's metadata, for which vLLM's setup.py runs. "empty": no kernels.
        subprocess.run(
            [
                *(str(PYTHON), "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
                *("--no-deps", "--no-binary", ":all:", "--no-build-isolation"),
                *("--require-hashes", "--dest", scratch, "-r", str(pinned)),
            ],
            env=os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
            check=True,
        )
        with tarfile.open(Path(scratch) / f"{VLLM}.tar.gz") as archive:
            wanted = [
                member for member in archive if member.name.partition("/")[2].startswith(VLLM_PARTS)
            ]
            archive.extractall(scratch, wanted, filter="data")
        (Path(scratch) / VLLM).rename(folder)
    return folder


def sglang_source(folder: Path) -> Path:
    """Return the folder of SGLang's checkout, whose tests must be the pinned ones."""
    found = source_sha256(folder)
    if found != SGLANG_SHA256:
        raise SystemExit(
            f"--sglang-source: the tests in {folder} have sha256 {found}, not {SGLANG_SHA256}. "
            f"Check out {PEERS['sglang'].version}"
        )
    return folder


def source_sha256(folder: Path) -> str:
    """Return the hash of SGLang's tests in the folder."""
    parts = (*PEERS["sglang"].files, "python/sglang/test/kits")
    digest = hashlib.sha256()
    for path in sorted(path for part in parts for path in (folder / part).rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def run_tests(peer: Peer, source: Path, files: Sequence[str]) -> dict[str, str]:
    """Run the tests and return their outcomes, by id."""
    models = FOLDER / "models"
    subprocess.run([str(PYTHON), str(HERE / "model_folders.py"), str(models)], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        lines = Path(scratch) / "outcomes.jsonl"
        command = [
            *(str(PYTHON), "-m", "pytest", "-c", str(HERE / "peers.ini"), f"--rootdir={source}"),
            *("-p", f"{peer.name}_plugin", "--results", str(lines), "-q", "--tb=short"),
            *("--expected", str(HERE / f"{peer.name}.toml"), *files),
        ]
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("FORGE_")},
            "PYTHONPATH": os.pathsep.join([str(HERE), str(source)]),
            "FORGE_PEERS_ROOT": str(ROOT),
            "FORGE_PEERS_MODELS": str(models),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        subprocess.run(command, cwd=source, env=environment, timeout=RUN_LIMIT_S, check=False)
        if not lines.is_file():
            raise SystemExit("pytest has run no test")
        read = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    outcomes: dict[str, str] = {}
    for each in read:  # a test that passes may fail at its end
        if outcomes.get(each["test"], PASSES) == PASSES:
            outcomes[each["test"]] = each["outcome"]
    return outcomes


def table(totals: Sequence[Total]) -> str:
    """Return the totals as a table, a row for each file and one for all."""
    whole = Total("all", *(sum(column) for column in list(zip(*totals, strict=True))[1:]))
    width = max(len(each.file) for each in totals)
    lines = [f"{'file':{width}}  pass  fail  not applicable"]
    lines += [
        f"{each.file:{width}}  {each.passes:4}  {each.fails:4}  {each.not_applicable:14}"
        for each in [*totals, whole]
    ]
    return "\n".join(lines) + "\n"


def write_table(peer: Peer, totals: Sequence[Total]) -> None:
    """Replace the peer's table on the page: the block after the heading of the peer's name."""
    text = PAGE.read_text("utf-8")
    opening = "```text\n"
    start = text.index(opening, text.index(f"\n### {peer.name} ")) + len(opening)
    end = text.index("```", start)
    PAGE.write_text(text[:start] + table(totals) + text[end:], "utf-8")


def summary(outcomes: Mapping[str, str]) -> str:
    """Return the totals in a line."""
    applicable = [each for each in outcomes.values() if each != NOT_APPLICABLE]
    passed = applicable.count(PASSES)
    share = 100 * passed / max(1, len(applicable))
    left_out = len(outcomes) - len(applicable)
    return f"{passed} of {len(applicable)} pass ({share:.1f} %), {left_out} are not applicable"


def main(words: Sequence[str] | None = None) -> int:
    """Run one peer's tests and return the exit status."""
    parser = argparse.ArgumentParser(description="Run the peers' tests of their servers.")
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("files", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--sglang-source", type=Path, help="a checkout of SGLang")
    parser.add_argument("--write-page", action="store_true", help="write the table of the page")
    options = parser.parse_intermixed_args(words)
    peer = PEERS[options.peer]
    expected = read_list(HERE / f"{peer.name}.toml")
    faults = find_faults(expected, ROOT)
    if faults:
        print(*faults, sep="\n")
        return 1
    if peer.name == "sglang" and options.sglang_source is None:
        parser.error("sglang needs --sglang-source: no registry has an archive of its tests")
    if options.write_page and options.files:
        parser.error("--write-page writes the totals of all files: name none")
    FOLDER.mkdir(exist_ok=True)
    install()
    source = vllm_source() if peer.name == "vllm" else sglang_source(options.sglang_source)
    outcomes = run_tests(peer, source.resolve(), options.files or peer.files)
    totals = count(outcomes)
    print(table(totals))
    if options.write_page:
        write_table(peer, totals)
    differences = compare(expected, outcomes, [each.file for each in totals])
    print(*differences, sep="\n")
    print(f"{peer.name} {peer.version}: {summary(outcomes)}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
