"""guidellm: load on chats, completions, responses; its report has the counts of the load."""

# /// script
# dependencies = ["guidellm==0.8.1"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from byte_tokenizer import write_tokenizer
from expected import KEY, MODEL, URL, chat, ids

NUM_REQUESTS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 24


def check_load(route: str) -> None:
    """Run `guidellm run` on this route; its report must have every request and token."""
    report = Path(f"{Path(route).name}.json")
    backend = {
        "kind": "openai_http",
        "target": URL,
        "model": MODEL,
        "request_format": route,
        "api_key": KEY,
    }
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--backend", json.dumps(backend)),
            *("--profile", "kind=concurrent,streams=2", "--data", data),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--tokenizer", "kind=huggingface_auto,model=tokenizer"),
            *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    # The server counts what its template adds to a message.
    added = 0 if route == "/v1/completions" else len(ids(chat(("user", ""))))
    prompts, outputs, first, latency = (
        metrics[name]["successful"]["mean"]
        for name in (
            *("prompt_token_count", "output_token_count"),
            *("time_to_first_token_ms", "request_latency"),
        )
    )
    assert (prompts, outputs) == (PROMPT_TOKENS + added, OUTPUT_TOKENS), metrics
    assert 0 < first < 1000 * latency, metrics


def main() -> None:
    write_tokenizer(Path("tokenizer"))
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        check_load(route)


if __name__ == "__main__":
    main()
