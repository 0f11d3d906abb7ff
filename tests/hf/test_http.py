"""A checkpoint over HTTP: text is that of generate(), and a bad folder is refused in one line.

The server is a process of its own, started as a user starts it, in float64: no token may differ.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")

from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402

from forge.cli.main import main  # noqa: E402
from forge.errors import ForgeError  # noqa: E402
from forge.llm import LLM  # noqa: E402
from tests.forge_process import start_server  # noqa: E402
from tests.hf.families import create_module, generate_greedy  # noqa: E402
from tests.hf.forked_processes import fork_engines_and_ranks  # noqa: E402
from tests.server.local_server import unexpected_log  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
VOCAB, EOS = 307, 2
COUNT = 40
PROMPTS = (
    "Once upon a time",
    "a",
    "Größe, 漢字 and 😀",
    "Once upon a time there was a scheduler, and it was fair to those that came late.",
    "\n\n  spaces ",
    "0123456789" * 12,
)


def save_checkpoint(folder: Path, family: str = "qwen3") -> Path:
    """Save a checkpoint of 307 tokens: random weights, and byte-level BPE as in GPT-2."""
    torch.set_num_threads(1)
    create_module(family, torch.float32).save_pretrained(folder)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*PROMPTS, Path(__file__).read_text("utf-8")], trainer)
    assert made.get_vocab_size() == VOCAB
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return save_checkpoint(tmp_path_factory.mktemp("saved"))


class Continuation(NamedTuple):
    """Tokens and text that transformers generates after a prompt."""

    text: str
    finish: str
    prompt_tokens: int
    tokens: int


def reference_continuations(folder: Path) -> list[Continuation]:
    """Return greedy continuations in float64, cut after the first end token."""
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = fast(prompt).input_ids
        tokens = generate_greedy(module.eval(), ids, COUNT)
        end = EOS in tokens
        tokens = tokens[: tokens.index(EOS) + 1] if end else tokens
        text = fast.decode(tokens, skip_special_tokens=True)
        found.append(Continuation(text, "stop" if end else "length", len(ids), len(tokens)))
    return found


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it is ready."""
    words = (str(checkpoint), "--dtype", "float64", "--device", "cpu")
    more = ("--max-num-seqs", "4", "--num-blocks", "200", "--served-model-name", "small")
    with start_server(*words, *more, stderr=subprocess.PIPE) as started:
        yield started


def build_body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": prompt, "max_tokens": COUNT, "temperature": 0, **fields}


def complete(url: str, prompt: str) -> Continuation:
    answer = httpx.post(f"{url}/v1/completions", json=build_body(prompt), timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    (choice,), usage = found["choices"], found["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Continuation(choice["text"], choice["finish_reason"], *counts)


def stream(url: str, prompt: str) -> Continuation:
    fields = build_body(prompt, stream=True, stream_options={"include_usage": True})
    text, finish, counts = "", [], ()
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            text += choice["text"]
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
        if chunk.get("usage"):
            counts = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
    (reason,) = finish
    return Continuation(text, reason, *counts)


@pytest.mark.parametrize("ask", [complete, stream])
def test_text_over_http_is_that_of_generate(
    server: tuple[subprocess.Popen[str], str],
    checkpoint: Path,
    ask: Callable[[str, str], Continuation],
) -> None:
    """More requests than rows, all at once."""
    _, url = server
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: ask(url, prompt), PROMPTS))
    assert found == reference_continuations(checkpoint)


def test_the_model_is_listed_and_knows_its_longest_sequence(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    (card,) = httpx.get(f"{server[1]}/v1/models", timeout=60).json()["data"]
    assert card["id"] == "small"
    answer = httpx.post(
        f"{server[1]}/v1/completions", json=build_body("a", max_tokens=2048), timeout=60
    )
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


def test_a_signal_ends_the_server_and_leaves_nothing(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    """Runs last: it ends the server that the tests above share."""
    process, url = server
    host, port = url.removeprefix("http://").split(":")
    process.send_signal(signal.SIGTERM)
    printed, complained = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "")
    # On a busy machine torch may take longer to unload than the server waits for the engine.
    assert re.fullmatch(
        r"INFO forge.start: tokens that end an output: 2 '<\|end\|>' \(.*, the tokenizer\)\n"
        r"INFO forge.start: loading weights: 0.0 GiB in \S+ s\n"
        r"INFO forge.start: model ready in \S+ s: process .*, imports .*, other \S+\n"
        r"(WARNING forge.engine: the engine did not end within 10 s and is killed\n)?",
        unexpected_log(complained),
    )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "weights cut short": (truncate_weights, "model.safetensors is cut short or damaged"),
    "weights of another shape": (
        lambda folder: change_config(folder, intermediate_size=128),
        "other shapes than config.json says",
    ),
    "an unknown architecture": (
        lambda folder: change_config(folder, model_type="of_tomorrow", architectures=["Tomorrow"]),
        "knows no model type 'of_tomorrow'",
    ),
}


def damaged_copy(checkpoint: Path, target: Path, spoil: Callable[[Path], None]) -> str:
    """Return the name of a copy of the folder with this damage."""
    folder = shutil.copytree(checkpoint, target / "spoiled")
    spoil(folder)
    return str(folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_cannot_be_served_is_refused_in_one_line(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    spoil, says = DAMAGES[name]
    with pytest.raises(ForgeError) as fault:
        LLM(damaged_copy(checkpoint, tmp_path, spoil), device="cpu")
    assert says in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_engines_and_ranks(monkeypatch)


def refuse_start(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which `forge serve` refuses to start."""
    assert main(["serve", *words, "--port", "0"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    return err


@pytest.mark.usefixtures("_forked")
def test_what_the_engines_process_refuses_the_command_says_in_one_line(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = damaged_copy(checkpoint, tmp_path, truncate_weights)
    error = refuse_start(capfd, folder, "--device", "cpu")
    assert "model.safetensors is cut short or damaged" in error


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--max-model-len", "100000"),
            "--max-model-len: 100000 is more than the 2048 positions",
        ),
        (
            ("--max-num-batched-tokens", "3", "--max-num-seqs", "4"),
            "--max-num-batched-tokens: 3 is less than max_num_seqs 4",
        ),
    ],
    ids=["too long", "a batch that cannot decode"],
)
def test_a_flag_that_cannot_be_is_named_as_it_was_given(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert says in refuse_start(capfd, str(checkpoint), "--device", "cpu", *words)


def test_a_folder_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "there is no folder" in refuse_start(capfd, str(tmp_path / "missing"))


@pytest.mark.usefixtures("_forked")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to serve on")
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "--device: there is no cuda" in refuse_start(capfd, str(checkpoint), "--device", "cuda")
