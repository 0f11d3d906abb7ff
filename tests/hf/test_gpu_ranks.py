"""Two ranks on two GPUs serve the tokens of one, and end with the rank that ends.

`make test-gpu ARGS="tests/hf/test_gpu_ranks.py -s"` prints the seconds of an end.
In float32 no token may differ. In bfloat16 one may where two logits are equal within rounding: then
the best token of one GPU is at most MAX_GAP likelier than the next.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
httpx = pytest.importorskip("httpx")
pytest.importorskip("transformers")

from transformers import AutoConfig  # noqa: E402

from forge.bench.shapes import SHAPES, write_config  # noqa: E402
from forge.engine_options import Options  # noqa: E402
from forge.llm import LLM  # noqa: E402
from forge.request import SamplingParams  # noqa: E402
from tests.forge_process import start_server  # noqa: E402
from tests.hf.families import create_module_from_config  # noqa: E402
from tests.hf.gpu_rank import WORLD_SIZE, run_rank  # noqa: E402
from tests.hf.test_rank_processes import (  # noqa: E402
    PARENT,
    ROOT,
    child_pids,
    torchrun_command,
)
from tests.ranks.test_rank_group import is_alive, wait_until  # noqa: E402

DEVICE = "cuda"
pytestmark = [
    *(pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(600)),
    pytest.mark.skipif(torch.cuda.device_count() < WORLD_SIZE, reason="needs two CUDA devices"),
]

SHORT = {"num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {**SHAPES["qwen3-0.6b"], **SHORT, "vocab_size": 4096}
"""Four layers with heads of 128 dimensions, four key heads a rank."""

WIDE = {**SHAPES["qwen3-32b"], **SHORT, "vocab_size": 8192}
"""Four layers of Qwen3-32B, and some of its ids."""

PROMPTS = ("Once upon a time", "a", "The quick brown fox. " * 12, "\n\n 0123456789")
GREEDY: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.8, "frequency_penalty": 0.6},
    {"temperature": 0.7, "logit_bias": {"7": 3.0}},
)
MAX_GAP = 0.6
MAX_LOGITS_ERROR = 1e-3
END_LIMIT_S = 5.0
"""Seconds in which all ranks end after one: see docs/Models.md."""

SESSION = 3
"""Number of the field of /proc/PID/stat after the name that is the session's id."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights that tests only read."""
    folder = write_config(tmp_path_factory.mktemp("ranks"), SMALL)
    module = create_module_from_config(AutoConfig.from_pretrained(folder), torch.float32)
    module.save_pretrained(folder)
    return folder


class Scored(NamedTuple):
    """Token of one GPU, and how much likelier the most likely token was than the next."""

    token: int
    gap: float


def bodies() -> list[dict[str, Any]]:
    """Return a greedy and a sampled body of /generate for each prompt."""
    greedy = [{"prompt": prompt, **GREEDY} for prompt in PROMPTS]
    pairs = enumerate(zip(PROMPTS, SAMPLED, strict=True))
    return greedy + [
        {"prompt": prompt, **GREEDY, **params, "seed": index} for index, (prompt, params) in pairs
    ]


def tokens_of_one_gpu(folder: Path, dtype: str) -> list[list[Scored]]:
    """Return the tokens of each body, from one GPU."""
    options: Options = {"device": DEVICE, "dtype": dtype, "num_blocks": 256}
    prompts, params = [], []
    for body in bodies():
        prompts.append(body.pop("prompt"))
        bias = {int(token): bias for token, bias in body.pop("logit_bias", {}).items()}
        params.append(SamplingParams(**body, logit_bias=bias, logprobs=2))
    with LLM(str(folder), **options) as alone:
        outputs = alone.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        scores = output.choices[0].logprobs
        found.append([Scored(each.token, each.top[0][1] - each.top[1][1]) for each in scores])
    return found


def serve_words(folder: Path, dtype: str) -> tuple[str, ...]:
    """Return the words of `forge serve` with two ranks. Blocks are as many as fit on both."""
    return (
        *(str(folder), "--tensor-parallel-size", str(WORLD_SIZE), "--check-ranks"),
        *("--device", DEVICE, "--dtype", dtype, "--gpu-memory-utilization", "0.3"),
        *("--served-model-name", "small", "--max-num-seqs", "8"),
    )


def generate(url: str, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{url}/generate", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["token_ids"]
    return token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_serve_the_tokens_of_one_over_http(checkpoint: Path, dtype: str) -> None:
    """Greedy and sampled requests at once, alone after that, and each rank checks the plans."""
    expected = tokens_of_one_gpu(checkpoint, dtype)
    with start_server(*serve_words(checkpoint, dtype)) as (_, url):
        with ThreadPoolExecutor(len(expected)) as pool:
            together = list(pool.map(lambda body: generate(url, body), bodies()))
        alone = [generate(url, body) for body in bodies()]
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
    num_greedy = len(PROMPTS)
    for found in (together, alone):
        assert [len(each) for each in found] == [GREEDY["max_tokens"]] * len(expected)
        pairs = zip(expected[:num_greedy], found[:num_greedy], strict=True)
        gaps = [gap for pair in pairs if (gap := first_gap(*pair)) is not None]
        print(f"{dtype}: {len(gaps)} of {num_greedy} greedy outputs differ, gaps {gaps}")
        if dtype == "float32":
            assert found == [[each.token for each in scored] for scored in expected]
        assert all(gap <= MAX_GAP for gap in gaps)


def first_gap(expected: Sequence[Scored], found: Sequence[int]) -> float | None:
    """Return the gap at the first token that differs, or None where none does."""
    for scored, token in zip(expected, found, strict=True):
        if scored.token != token:
            return scored.gap
    return None


def session_pids(session_id: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[SESSION]) == session_id and is_alive(int(stat.parent.name)):
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("victim", ["rank 1", "rank 0", "server"])
def test_a_process_that_is_killed_in_a_step_ends_all_ranks(checkpoint: Path, victim: str) -> None:
    """No rank is left, nor any process of the server once that has ended."""
    body = {"model": "small", "prompt": "a", **GREEDY, "max_tokens": 8000, "stream": True}
    with start_server(*serve_words(checkpoint, "bfloat16")) as (process, url):
        rank_1, rank_0 = child_pids(process.pid)
        victims = {"rank 1": rank_1, "rank 0": rank_0, "server": process.pid}
        lines = []
        with (
            suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 40:
                    killed_s = time.monotonic()
                    os.kill(victims[victim], signal.SIGKILL)
        wait_until(lambda: not is_alive(rank_0) and not is_alive(rank_1))
        seconds = time.monotonic() - killed_s
        print(f"{victim} killed: all ranks ended after {seconds:.2f} s")
        assert seconds < END_LIMIT_S
        if victim != "server":
            errors = [line for line in lines if '"error"' in line]
            assert len(errors) == 1 and "engine_dead" in errors[0], lines[-3:]
            # A server whose engine has ended answers 503 for a second, and ends with status 1.
            assert process.wait(60) == 1
        wait_until(lambda: not session_pids(process.pid))
        print(f"{victim} killed: all processes ended after {time.monotonic() - killed_s:.2f} s")


def test_prefixes_come_back_from_the_host_memory_of_two_ranks(checkpoint: Path) -> None:
    """The devices hold ten prompts, host memory all. A block is stored once it was used twice."""
    prompts = [[*range(9 + 250 * index, 489 + 250 * index)] for index in range(14)]
    words = ("--block-size", "16", "--num-blocks", "300", "--max-model-len", "1024")
    tier = (*words, "--kv-host-gib", "0.5", "--kv-load-rule", "always")
    with start_server(*serve_words(checkpoint, "float32"), *tier) as (_, url):
        rounds = [
            [
                generate(url, {**GREEDY, "prompt": prompt, "max_tokens": 8})
                for prompt in prompts
                for _ in range(2)
            ]
            for _ in range(2)
        ]
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert rounds[0] == rounds[1]
    (hits,) = re.findall(r"^forge_host_cache_hits_total\S* (\S+)$", metrics, re.MULTILINE)
    print(f"tokens from host memory: {hits}")
    assert float(hits) > 1000


def test_torchrun_starts_the_ranks_of_a_server(checkpoint: Path) -> None:
    """SIGTERM of torchrun ends both processes that it has started, and their children."""
    words = serve_words(checkpoint, "bfloat16")
    with start_server(*words, launcher=torchrun_command()) as (process, url):
        workers = pids_with(str(checkpoint), process.pid)
        assert len(workers) == WORLD_SIZE
        pids = [*workers, *(pid for worker in workers for pid in child_pids(worker))]
        tokens = generate(url, bodies()[0])
        assert len(tokens) == GREEDY["max_tokens"]
        process.terminate()
        process.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)))


def pids_with(word: str, parent: int) -> list[int]:
    """Return the children of a process whose command has this word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[PARENT]) == parent and word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def test_llm_leads_from_the_programs_own_thread(checkpoint: Path) -> None:
    code = (
        "from forge import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    options = dict(device={DEVICE!r}, num_blocks=64, tensor_parallel_size=2)\n"
        f"    with LLM({str(checkpoint)!r}, **options) as llm:\n"
        "        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)\n"
        "        print(len(llm.generate('Once', params)[0].choices[0].token_ids))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=400, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "4\n")


def test_layers_of_qwen3_32b_on_two_gpus_have_the_logits_and_tokens_of_one(tmp_path: Path) -> None:
    """Random weights in float32. Relative error of the logits of a position, largest."""
    folder = write_config(tmp_path / "wide", WIDE)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
    processes = [
        context.Process(
            target=run_rank,
            args=(rank, DEVICE, str(tmp_path / "store"), str(folder), pipes[rank][1]),
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        alone = pipes[0][0].recv()
        found = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    whole = torch.tensor(alone.logits)
    parts = torch.cat([torch.tensor(each.logits) for each in found], 1)
    error = float(((parts - whole).norm(dim=-1) / whole.norm(dim=-1)).max())
    print(f"relative error of logits {error:.3g}")
    assert error < MAX_LOGITS_ERROR
    assert not alone.errors
    assert [each.tokens for each in found] == [alone.tokens] * WORLD_SIZE
