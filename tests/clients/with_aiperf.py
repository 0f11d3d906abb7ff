"""aiperf: load on chats, completions, responses; its report has the counts of the load."""

# /// script
# dependencies = ["aiperf==0.13.0"]
# ///

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from byte_tokenizer import write_tokenizer
from expected import KEY, MODEL, URL

NUM_REQUESTS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 24
TOKENIZER = str(Path("tokenizer").resolve())
# Outputs of that length exactly, in letters: aiperf counts the tokens of the text.
EXACT = (f"min_tokens:{OUTPUT_TOKENS}", "temperature:0")


def check_load(endpoint: str) -> None:
    """Run `aiperf profile` on this endpoint; its report must have every request and token."""
    folder = Path(endpoint)
    run = subprocess.run(
        [
            *("aiperf", "profile", "--model", MODEL, "--url", URL, "--api-key", KEY),
            *("--endpoint-type", endpoint, "--streaming", "--tokenizer", TOKENIZER),
            *("--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
            *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
            *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", *EXACT),
            *("--ui", "none", "--artifact-dir", str(folder)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    (report,) = folder.rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text("utf-8"))
    assert figures["request_count"]["avg"] == NUM_REQUESTS, figures
    assert not figures.get("error_summary"), figures
    assert figures["input_sequence_length"]["avg"] == PROMPT_TOKENS, figures
    assert figures["output_sequence_length"]["avg"] == OUTPUT_TOKENS, figures
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"], figures


def main() -> None:
    write_tokenizer(Path(TOKENIZER))
    for endpoint in ("chat", "completions", "responses"):
        check_load(endpoint)


if __name__ == "__main__":
    main()
