"""lm-eval: choices, rolling likelihood, generation with known scores; three sources of ids.

Three tasks, each written to a folder with its documents:

    choices      which of four texts is the most likely: the right answer is that text on three of
                 four documents and the least likely on the fourth, so the accuracy is 0.75
    rolling      how likely a text is, from its beginning
    greedy       the output up to a space: the target is that output on five of eight documents

and three ways to make the ids: a tokenizer folder, the same with prompts sent as text, and the
server's own /tokenize.
"""

# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.23.0"]
# ///

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expected import END, KEY, MODEL, URL, greedy, ids, is_near, score_of

os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
import lm_eval
from byte_tokenizer import write_tokenizer
from lm_eval.tasks import TaskManager

QUESTIONS = [f"Nº {number}: which number is it?\nAnswer:" for number in range(12)]
CHOICES = ["four", "five", "seven", "eight", "thirty"]
TEXTS = ["It was a bright cold day", "and the clocks were striking thirteen", "ünïcödé"]
PROMPTS = [f"Say {number} things" for number in range(8)]
NUM_RIGHT = 5

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": CHOICES,
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "greedy": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": [" "], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def scores(question: str) -> list[float]:
    """Return the log probability of each choice."""
    return [score_of(ids(question), ids(" " + choice)) for choice in CHOICES]


def choices_documents() -> list[dict[str, Any]]:
    documents = []
    for number, question in enumerate(QUESTIONS):
        found = scores(question)
        wanted = min(found) if number % 4 == 3 else max(found)
        documents.append({"question": question, "answer": found.index(wanted)})
    return documents


def first_word(prompt: str) -> str:
    return greedy(prompt, 24).text.split(" ")[0]


def greedy_documents() -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "target": first_word(prompt) + ("" if number < NUM_RIGHT else "!")}
        for number, prompt in enumerate(PROMPTS)
    ]


def write_tasks(folder: Path) -> None:
    """Write a YAML file (as JSON, which YAML includes) and the documents of each task."""
    documents = {
        "choices": choices_documents(),
        "rolling": [{"text": text} for text in TEXTS],
        "greedy": greedy_documents(),
    }
    folder.mkdir()
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, documents[name])), "utf-8")
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole), "utf-8")


def evaluate(tasks: Sequence[str], batch_size: int, **arguments: object) -> dict[str, Any]:
    """Return lm-eval's report: the results, and the samples of each task.

    The commands of the page run the same with its own tasks, whose thousands of files it reads.
    """
    given = {
        "model": MODEL,
        "base_url": f"{URL}/v1/completions",
        "max_retries": 1,
        "timeout": 60,
        **arguments,
    }
    report = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=given,
        tasks=list(tasks),
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
        batch_size=batch_size,
        log_samples=True,
    )
    samples = {
        task: sorted(report["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks
    }
    return {"results": report["results"], **samples}


def check_choices(report: dict[str, Any]) -> None:
    documents = choices_documents()
    for sample, document in zip(report["choices"], documents, strict=True):
        reported = [float(answers[0][0]) for answers in sample["resps"]]
        assert all(map(is_near, reported, scores(document["question"]))), (reported, document)
    accuracy = report["results"]["choices"]["acc,none"]
    assert accuracy == 0.75, f"the accuracy is 0.75, lm-eval says {accuracy}"
    right = 0
    for document in documents:
        by_length = [
            score / len(choice)
            for score, choice in zip(scores(document["question"]), CHOICES, strict=True)
        ]
        right += by_length.index(max(by_length)) == document["answer"]
    # Otherwise the two figures could be the same one.
    assert right / len(documents) != accuracy
    shown = report["results"]["choices"]["acc_norm,none"]
    assert shown == right / len(documents), f"{right} of {len(documents)}, lm-eval says {shown}"


def check_rolling(report: dict[str, Any]) -> None:
    # The first character is scored after the end token.
    total = sum(score_of([END], ids(text)) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    shown = report["results"]["rolling"]["bits_per_byte,none"]
    assert is_near(shown, -total / size / math.log(2)), (shown, total, size)


def check_greedy(report: dict[str, Any]) -> None:
    outputs = [sample["resps"][0][0] for sample in report["greedy"]]
    assert outputs == [first_word(prompt) for prompt in PROMPTS], outputs
    shown = report["results"]["greedy"]["exact_match,none"]
    assert shown == NUM_RIGHT / len(PROMPTS), f"5 of 8 are right, lm-eval says {shown}"


def main() -> None:
    write_tasks(Path("tasks"))
    write_tokenizer(Path("tokenizer"))
    folder = {"tokenizer": "tokenizer", "tokenizer_backend": "huggingface"}
    report = evaluate(list(TASKS), 3, **folder, num_concurrent=4)
    check_choices(report)
    check_rolling(report)
    check_greedy(report)
    # As text the end token before a rolling text is seven characters, so that task is left out.
    report = evaluate(["choices", "greedy"], 1, **folder, tokenized_requests=False)
    check_choices(report)
    check_greedy(report)
    # Without a tokenizer, lm-eval uses the server's. It reads the end token's id off its name,
    # which this server encodes as text, so the command gives the id.
    report = evaluate(list(TASKS), 2, auth_token=KEY, custom_prefix_token_id=END)
    check_choices(report)
    check_rolling(report)
    check_greedy(report)
    print("loglikelihood, rolling, generate_until: ids of a folder, text, ids of the server")


if __name__ == "__main__":
    main()
