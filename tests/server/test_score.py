"""/v1/score: probabilities of tokens after texts, compared with logprobs of completions.

Each token of the model `hash` is a byte, so every prompt of a test is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from forge.errors import InvalidRequest
from forge.outputs import ChoiceOutput, RequestOutput
from forge.server.body import MAX_BODY_BYTES
from forge.server.errors import APIError
from forge.server.protocol import parse_request
from forge.server.score import ScoreRequest, item_scores
from forge.tokenizer import ByteTokenizer
from tests.server.test_server import (
    MAX_MODEL_LEN,
    RunningServer,
    check_envelope,
    open_server,
    wait_until,
)

PATH = "/v1/score"
LABELS = [98, 99, 100]
BODY: dict[str, Any] = {"query": "ab", "items": ["c", "dé"], "label_token_ids": LABELS}
PROMPTS = ["abc", "abdé"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server() as running:
        yield running
        wait_until(running.is_idle)


def score(server: RunningServer, **fields: Any) -> list[list[float]]:
    """Return the scores of a request, which must succeed."""
    answer = server.post(PATH, **{**BODY, **fields})
    assert answer.status_code == 200, answer.text
    scores: list[list[float]] = answer.json()["scores"]
    return scores


def probabilities(server: RunningServer, prompt: str) -> list[float]:
    """Return the probabilities of LABELS after a prompt, by /v1/completions."""
    listed = {"logprobs": 0, "logprob_token_ids": LABELS, "return_tokens_as_token_ids": True}
    answer = server.post_completion(prompt=prompt, max_tokens=1, **listed)
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return [math.exp(top[f"token_id:{label}"]) for label in LABELS]


def test_a_score_is_the_probability_of_the_next_token(server: RunningServer) -> None:
    answer = server.post(PATH, **BODY).json()
    num_tokens = sum(len(prompt.encode()) for prompt in PROMPTS)
    assert answer.pop("usage").pop("prompt_tokens_details") is not None
    scores = answer.pop("scores")
    assert answer == {"object": "scoring", "model": "hash"}
    assert scores == [pytest.approx(probabilities(server, prompt)) for prompt in PROMPTS]
    usage = server.post(PATH, **BODY, model="hash").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}, "the block abdé[0]"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 0)
    assert usage["total_tokens"] == num_tokens


def test_scores_of_the_whole_vocabulary_make_up_one(server: RunningServer) -> None:
    ids = list(range(ByteTokenizer().vocab_size))
    parts = [score(server, label_token_ids=ids[i : i + 128]) for i in range(0, len(ids), 128)]
    for item in range(2):
        assert math.fsum(each for part in parts for each in part[item]) == pytest.approx(1.0)


def test_a_softmax_is_over_the_labels(server: RunningServer) -> None:
    """Labels keep their order, and one may come twice."""
    labels = [100, 98, 100]
    for plain, shares in zip(
        score(server, label_token_ids=labels),
        score(server, label_token_ids=labels, apply_softmax=True),
        strict=True,
    ):
        assert plain[0] == plain[2]
        assert shares == pytest.approx([each / math.fsum(plain) for each in plain])
        assert math.fsum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"items": "c"}, ["abc"]),
        ({"item_first": True}, ["cab", "déab"]),
        ({"query": ""}, ["c", "dé"]),
        ({"query": [98, 99], "items": [[100], [101, 102]]}, ["abc", "abde"]),
        ({"query": [98, 99], "items": [[100], []], "item_first": True}, ["cab", "ab"]),
    ],
    ids=str,
)
def test_a_prompt_is_the_query_and_an_item(
    server: RunningServer, fields: dict[str, Any], prompts: list[str]
) -> None:
    expected = [pytest.approx(probabilities(server, prompt)) for prompt in prompts]
    assert score(server, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": None}, "query: it is missing"),
        ({"query": ["a"]}, "query: it is neither text nor token ids"),
        ({"query": 5}, "query: it is neither text nor token ids"),
        ({"items": None}, "items: it is missing"),
        ({"items": []}, "items: it is missing"),
        ({"items": 42}, "items: it is neither text nor token ids"),
        ({"items": ["a"] * 257}, "items: 257 prompts, at most 256"),
        ({"items": ["a", [98]]}, "items: it is neither text nor token ids"),
        ({"items": [[98]]}, "items[0]: text and token ids cannot be joined"),
        ({"query": [98]}, "items[0]: text and token ids cannot be joined"),
        ({"query": "", "items": ["a", ""]}, "items[1]: it is empty"),
        (
            {"items": ["a", "x" * MAX_MODEL_LEN]},
            "items[1]: Input tokens exceed the configured limit",
        ),
        ({"query": [98], "items": [[1], [257]]}, "items[1]: Token ID 257 is out of vocabulary"),
        ({"label_token_ids": None}, "label_token_ids: it is missing"),
        ({"label_token_ids": []}, "label_token_ids: it is missing"),
        ({"label_token_ids": "bad"}, "label_token_ids: "),
        ({"label_token_ids": [1] * 129}, "label_token_ids: 129 items, at most 128"),
        ({"label_token_ids": [999999]}, "label_token_ids: Token ID 999999 is out of vocabulary"),
        ({"label_token_ids": [-1]}, "label_token_ids: -1 is not a token id"),
        ({"apply_softmax": 1}, "apply_softmax: "),
        ({"query_embed_overrides": [[0.5]]}, "query_embed_overrides: it is not supported"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states: it is not supported"),
        ({"text_1": "a"}, "text_1: there is no such field"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_in_the_form_of_sglang(
    server: RunningServer, fields: dict[str, Any], message: str
) -> None:
    answer = server.post(PATH, **{**BODY, **fields})
    check_envelope(answer, 400, message.partition(":")[0], "")
    assert answer.json()["message"].startswith(message)
    assert server.is_idle()


@pytest.mark.parametrize("unit", ["a", [98]], ids=["text", "ids"])
def test_a_long_query_with_many_items_is_refused_before_they_are_joined(
    unit: str | list[int],
) -> None:
    """The prompts are no longer than those that a body of /v1/completions can have."""
    num_items = 128
    query_len = MAX_BODY_BYTES // num_items - 1
    body: dict[str, Any] = {"query": unit * query_len, "items": [unit] * num_items}
    assert len(parse_request(ScoreRequest, body).parse_items()) == num_items
    body["items"][0] = unit * 2
    with pytest.raises(InvalidRequest, match=f"characters or ids, at most {MAX_BODY_BYTES}") as one:
        parse_request(ScoreRequest, body).parse_items()
    assert (one.value.field, one.value.code) == ("items", "too_many_items")


def test_an_item_that_a_pause_has_aborted_has_no_score() -> None:
    output = RequestOutput([98], [ChoiceOutput(0, finish_reason="abort")])
    with pytest.raises(APIError, match="A pause of the engine ended the request"):
        item_scores(parse_request(ScoreRequest, BODY), output)


def test_an_error_before_the_body_is_read_has_the_same_form(server: RunningServer) -> None:
    check_envelope(server.client.get(PATH), 405, None, "")
    check_envelope(server.post(PATH, **BODY, model="other"), 404, "model", "")
