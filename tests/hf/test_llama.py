"""The embedded model in numpy against HFModel on the CPU, token by token, in float32.

The two add in another order, so two tokens may change places where their scores are level. Then
the outputs part, and the test checks the scores at that place.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.models.embedded import embedded_folder  # noqa: E402
from forge.models.llama import Llama  # noqa: E402
from forge.models.paged_decoder import BlockRow  # noqa: E402
from forge.request import Request  # noqa: E402
from forge.sampling import PLAIN, draw_key, gumbel, process_logits  # noqa: E402
from tests.models.ragged_runs import draw_requests, run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]

LEVEL = 1e-3
"""Scores that differ by less are level: float32 logits differ by some 1e-5 between the models."""


def score_difference(request: Request, output: list[int], a: int, b: int) -> float:
    """Return by how much the scores of two tokens differ after this output."""
    context, params = [*request.prompt, *output], request.params
    (row,) = Llama(embedded_folder("tiny"), 64, 16).forward([BlockRow(range(64), 0, context)])
    logits = process_logits(row(len(context)), params, request.prompt, output, (0,))
    if params.greedy:
        return abs(logits[a] - logits[b])
    assert params.seed is not None
    key = draw_key(params.seed, len(context), PLAIN)
    scores = [logits[token] / params.temperature + gumbel(key, token) for token in (a, b)]
    return abs(scores[0] - scores[1])


@pytest.mark.parametrize(
    ("count", "max_tokens"),
    [(12, 24), pytest.param(110, 96, marks=pytest.mark.soak)],
    ids=["quick", "ten thousand tokens"],
)
def test_tokens_are_those_of_hf_model(count: int, max_tokens: int) -> None:
    """Chunks, preemption, prefix hits and drafts in numpy; HFModel runs a few at a time."""
    torch.set_num_threads(1)
    requests = draw_requests(7, count, max_tokens)
    folder: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
    meant = run(str(embedded_folder("tiny")), requests, **folder)
    found = run(
        "tiny",
        requests,
        seed=1,
        max_num_seqs=12,
        max_num_batched_tokens=40,
        num_blocks=32,
        draft_model="tiny-draft",
    )
    assert found.num_preemptions and found.num_cached_tokens and found.num_accepted_tokens
    num_tokens, parted = 0, 0
    for request in requests:
        a, b = meant.outputs[request.id], found.outputs[request.id]
        num_tokens += len(b.tokens)
        for ours, theirs in zip(b.prompt_logprobs, a.prompt_logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=LEVEL)
        if a.tokens == b.tokens:
            for ours, theirs in zip(b.logprobs, a.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=LEVEL)
            continue
        parted += 1
        at = next(
            i for i, pair in enumerate(zip(a.tokens, b.tokens, strict=False)) if len(set(pair)) > 1
        )
        assert score_difference(request, a.tokens[:at], a.tokens[at], b.tokens[at]) < LEVEL
    print(f"{num_tokens} tokens, {parted} of {count} outputs part")
    assert parted <= count // 50
