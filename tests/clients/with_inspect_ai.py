"""inspect-ai: an evaluation with known scores, whole and streamed."""

# /// script
# dependencies = ["inspect-ai==0.3.285", "openai==3.57.0"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from expected import KEY, MODEL, URL, chat, greedy, ids
from inspect_ai.log import read_eval_log

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def words():
    return Task(dataset=json_dataset("words.jsonl"), solver=generate(), scorer=exact())
"""
PROMPTS = [f"Say {number} things" for number in range(8)]
NUM_RIGHT = 5
KNOWN = [greedy(chat(("user", prompt)), 24) for prompt in PROMPTS]


def check_evaluation(name: str, *words: str) -> None:
    """Run `inspect eval` with these words; it must succeed with the known scores."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "inspect_ai", "eval", "task.py"),
            *("--model", f"openai-api/forge/{MODEL}", "--temperature", "0", "--max-tokens", "24"),
            *("--log-dir", name, "--display", "plain", "--max-retries", "0", *words),
        ],
        # forge reads these names too: they are for the client alone.
        env={**os.environ, "FORGE_BASE_URL": f"{URL}/v1", "FORGE_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout
    (file,) = Path(name).iterdir()
    log = read_eval_log(str(file))
    assert log.status == "success" and log.samples and log.results, run.stdout
    samples = sorted(log.samples, key=lambda sample: int(sample.id))
    texts = [sample.output.completion for sample in samples]
    assert texts == [answer.text for answer in KNOWN], texts
    reasons = [sample.output.stop_reason for sample in samples]
    expected = {"length": "max_tokens", "stop": "stop"}
    assert reasons == [expected[answer.finish_reason] for answer in KNOWN], reasons
    usage = log.stats.model_usage[f"openai-api/forge/{MODEL}"]
    num_input = sum(len(ids(chat(("user", each)))) for each in PROMPTS)
    num_cached = usage.input_tokens_cache_read or 0
    # Some versions count cached tokens separately.
    assert usage.input_tokens in (num_input, num_input - num_cached), usage
    assert usage.output_tokens == sum(answer.tokens for answer in KNOWN), usage
    mean = log.results.scores[0].metrics["mean"].value
    assert mean == NUM_RIGHT / len(PROMPTS), f"5 of 8 are right, inspect-ai says {mean}"


def main() -> None:
    Path("task.py").write_text(TASK, "utf-8")
    lines = [
        {"input": prompt, "target": answer.text + ("" if number < NUM_RIGHT else " wrong")}
        for number, (prompt, answer) in enumerate(zip(PROMPTS, KNOWN, strict=True))
    ]
    Path("words.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    check_evaluation("whole")
    check_evaluation("streamed", "-M", "stream=true")
    print("eval: whole and streamed; 5 of 8 right")


if __name__ == "__main__":
    main()
