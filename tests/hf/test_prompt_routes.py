"""One rule for prompts on every route: ids, the space of a continuation, and sampling defaults.

A checkpoint with random weights and a SentencePiece tokenizer. The ids are those of transformers,
the texts those of its streaming decoder, which has read the prompt, as in vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")

from starlette.applications import Starlette  # noqa: E402
from tokenizers.decoders import DecodeStream  # noqa: E402

from forge.async_llm import AsyncLLM, RequestObserver  # noqa: E402
from forge.llm import LLM  # noqa: E402
from forge.outputs import TextDelta  # noqa: E402
from forge.request import Request, SamplingParams  # noqa: E402
from forge.server.app import create_app  # noqa: E402
from tests.hf.test_tokenizer import create_sentencepiece, save_tokenizer  # noqa: E402
from tests.server.test_routes import post  # noqa: E402

pytestmark = pytest.mark.torch

OPTIONS: dict[str, Any] = {
    **{"device": "cpu", "dtype": "float32", "load_format": "dummy", "num_blocks": 60},
    **{"block_size": 8, "max_num_seqs": 4},
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)
DEFAULTS = {
    **{"do_sample": False, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125},
    **{"repetition_penalty": 1.5, "max_new_tokens": 5},
}
PROMPTS = (
    "was fair",
    "<s>was fair",
    " Once <s> upon<|end|>a time <|end|>",
    "<|end|>",
    "the <unk> of <s",
)
MESSAGES = [{"role": "user", "content": "was <|end|> fair"}]


class Requests(RequestObserver):
    """Observer of the engine that keeps the requests it was sent."""

    def __init__(self) -> None:
        self.sent: list[Request] = []

    def on_step(self, report: Any) -> None:
        pass

    def on_request(self, request: Request) -> RequestObserver:
        self.sent.append(request)
        return self

    def on_deltas(self, deltas: Sequence[TextDelta]) -> None:
        pass

    def on_close(self) -> None:
        pass


class Served:
    """A server's application and what its engine was sent."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.llm = AsyncLLM(str(folder), **OPTIONS, **options)
        self.app: Starlette = create_app(self.llm, served_model_name="m")
        self.requests = Requests()
        self.llm.add_observer(self.requests)
        self.fast = transformers.AutoTokenizer.from_pretrained(folder)

    def sent(self, path: str, **body: Any) -> Request:
        """Return the engine's request of a call that succeeds."""
        self.requests.sent.clear()
        answer = post(self.app, path, **body)
        assert answer.status_code == 200, (path, body, answer.text)
        (request,) = self.requests.sent
        return request

    def id_of(self, piece: str) -> int:
        token: int = self.fast.convert_tokens_to_ids(piece)
        assert token != self.fast.unk_token_id
        return token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    save_tokenizer(folder, create_sentencepiece(), chat_template=TEMPLATE)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(folder))
    transformers.LlamaConfig(
        **size, **heads, vocab_size=vocab_size, bos_token_id=1, eos_token_id=2
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    yield served
    served.llm.close()


def encode_by_transformers(served: Served, text: str, added: bool, parsed: bool) -> list[int]:
    backend = tokenizers.Tokenizer.from_str(served.fast.backend_tokenizer.to_str())
    backend.encode_special_tokens = not parsed
    ids: list[int] = backend.encode(text, add_special_tokens=added).ids
    if parsed:
        assert ids == served.fast(text, add_special_tokens=added)["input_ids"]
    return ids


def ids_by_route(served: Served, prompt: str, fields: dict[str, bool]) -> dict[str, list[int]]:
    """Return the ids that each route makes of a prompt."""
    answer = post(served.app, "/tokenize", prompt=prompt, **fields)
    found = {"/tokenize": answer.json()["tokens"]}
    for path in ("/v1/completions", "/generate", "/invocations"):
        request = served.sent(path, prompt=prompt, max_tokens=1, **fields)
        found[path] = [*request.prompt]
    middle = len(prompt) // 2
    for first in (True, False):
        parts = prompt[:middle], prompt[middle:]
        query, item = reversed(parts) if first else parts
        body = {"query": query, "items": [item], "item_first": first, "label_token_ids": [5]}
        found[f"/v1/score {first}"] = [*served.sent("/v1/score", **body, **fields).prompt]
    params = SamplingParams(max_tokens=1)

    async def stream() -> None:
        async for _ in served.llm.stream(prompt, params, **fields):
            pass

    served.requests.sent.clear()
    asyncio.run(served.llm.generate(prompt, params, **fields))
    asyncio.run(stream())
    found |= {f"AsyncLLM {i}": [*each.prompt] for i, each in enumerate(served.requests.sent)}
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_route_makes_the_ids_that_transformers_makes(served: Served, prompt: str) -> None:
    for added, parsed in product((None, True, False), repeat=2):
        given = {"add_special_tokens": added, "parse_special_tokens": parsed}
        fields = {name: value for name, value in given.items() if value is not None}
        expected = encode_by_transformers(served, prompt, added is not False, parsed is not False)
        found = ids_by_route(served, prompt, fields)
        assert len(found) == 8
        assert {route: ids for route, ids in found.items() if ids != expected} == {}


def test_the_python_api_makes_the_same_ids(served: Served, folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm, llm.session() as session:
        for prompt, added, parsed in product(PROMPTS, (True, False), (True, False)):
            expected = encode_by_transformers(served, prompt, added, parsed)
            params = SamplingParams(max_tokens=1)
            for generate in (lambda *a, **b: llm.generate(*a, **b)[0], session.generate):
                output = generate(
                    prompt, params, add_special_tokens=added, parse_special_tokens=parsed
                )
                assert output.prompt_token_ids == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/tokenize"])
def test_messages_of_a_chat_are_never_parsed(served: Served, path: str) -> None:
    body: dict[str, Any] = {"messages": MESSAGES}
    plain = served.llm.tokenizer.encode("was <|end|> fair", parse_special_tokens=False)[1:]
    for fields in ({}, {"parse_special_tokens": False, "add_special_tokens": False}):
        if path == "/tokenize":
            ids = post(served.app, path, **body, **fields).json()["tokens"]
        else:
            ids = [*served.sent(path, **body, **fields, max_tokens=1).prompt]
        assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids
        assert str(plain)[1:-1] in str(ids)
    for name in ("parse_special_tokens", "add_special_tokens"):
        error = post(served.app, path, **body, **{name: True}).json()["error"]
        assert error["param"] == name


# The space of a continuation.


def texts_of_completion(served: Served, **body: Any) -> list[str]:
    """Return the text of a completion, whole and streamed."""
    whole = post(served.app, "/v1/completions", **body).json()["choices"][0]["text"]
    events = post(served.app, "/v1/completions", stream=True, **body).text.split("\n\n")
    chunks = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
    return [whole, "".join(each["choices"][0]["text"] for each in chunks)]


def decode_after(served: Served, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Return the text of an output after its prompt, as vLLM decodes it."""
    backend = served.fast.backend_tokenizer
    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    return "".join(stream.step(backend, token) or "" for token in output)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once upon", " was was"),
        ("<s>", "was was"),
        ("Once<|end|>", "was was"),
        ("Once \n", " was was"),
    ],
)
def test_a_completion_continues_the_text_of_its_prompt(
    served: Served, prompt: str, expected: str
) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "allowed_token_ids": [served.id_of("▁was")]}
    ids = served.fast(prompt)["input_ids"]
    if "<|end|>" not in prompt:
        assert decode_after(served, ids, body["allowed_token_ids"] * 2) == expected
    for given in (prompt, ids):
        assert texts_of_completion(served, **{**body, "prompt": given}) == [expected] * 2
    assert texts_of_completion(served, **body, echo=True) == [prompt + expected] * 2
    assert post(served.app, "/generate", **body).json()["text"] == expected
    scored = post(served.app, "/v1/completions", **body, logprobs=0, echo=True).json()
    offsets = scored["choices"][0]["logprobs"]["text_offset"]
    assert offsets[-2:] == [len(prompt), len(prompt) + len(expected) - len(" was")]
    assert offsets[: len(ids)] == sorted(offsets[: len(ids)]) and offsets[0] == 0
    stopped = texts_of_completion(served, **body, stop=" was")
    assert stopped == [expected.partition(" was")[0]] * 2


def test_offsets_count_the_names_that_the_text_of_a_prompt_has(served: Served) -> None:
    body = {"max_tokens": 0, "echo": True, "logprobs": 0}
    for prompt, added, expected in (
        ("<|end|>was", True, [0, 0, 7]),
        ("<|end|>was", False, [0, 7]),
        ("<s>was", True, [0, 0, 3]),
    ):
        fields = {"prompt": prompt, "add_special_tokens": added}
        (choice,) = post(served.app, "/v1/completions", **body, **fields).json()["choices"]
        assert choice["text"] == prompt
        offsets = choice["logprobs"]["text_offset"]
        assert [offset for offset in offsets if offset <= expected[-1]] == expected


def test_the_answer_of_a_chat_begins_a_text(served: Served) -> None:
    """Unless it continues the final message, whose text it then follows."""
    token = served.id_of("▁was")
    body = {"messages": MESSAGES, "max_tokens": 2, "allowed_token_ids": [token]}
    alone = served.fast.decode([token, token])
    assert alone == "was was"
    for fields, expected in (
        ({}, alone),
        ({"stop": " was"}, "was"),
        ({"stop": "was"}, ""),
        ({"continue_final_message": True, "add_generation_prompt": False}, " was was"),
    ):
        answer = post(served.app, "/v1/chat/completions", **body, **fields).json()
        assert answer["choices"][0]["message"]["content"] == expected
        events = post(served.app, "/v1/chat/completions", **body, **fields, stream=True).text
        chunks = [json.loads(each[6:]) for each in events.split("\n\n") if "data: {" in each]
        deltas = [each["choices"][0]["delta"].get("content") or "" for each in chunks]
        assert "".join(deltas) == expected


def test_texts_of_the_python_api_are_those_of_the_routes(served: Served, folder: Path) -> None:
    token = served.id_of("▁was")
    params = SamplingParams(max_tokens=2, allowed_token_ids=[token], stop="swas")
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.generate("Once upon", params)[0].text == " was was"
        assert "".join(each.text for each in llm.stream("Once upon", params)) == " was was"
        assert llm.generate([[1]], params)[0].text == "was was"
        assert llm.chat(MESSAGES, params)[0].text == "was was"
        assert llm.chat(MESSAGES, params, continue_final_message=True)[0].text == " was was"


# Defaults of sampling.

EXPECTED = {
    **{name: value for name, value in DEFAULTS.items() if not name.startswith(("do_", "max_"))},
    "max_tokens": 5,
}
SAMPLED_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "was"},
    "/generate": {"prompt": "was"},
    "/invocations": {"prompt": "was"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES]},
    "/v1/responses": {"input": "was"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


def params_of(request: Request) -> dict[str, Any]:
    return {name: getattr(request.params, name) for name in EXPECTED}


@pytest.mark.parametrize("path", SAMPLED_ROUTES)
def test_requests_have_the_checkpoints_defaults_for_what_they_leave_out(
    served: Served, path: str
) -> None:
    body = SAMPLED_ROUTES[path]
    assert params_of(served.sent(path, **body)) == EXPECTED
    given = {"top_p": 0.75, "temperature": 1.0}
    assert params_of(served.sent(path, **body, **given)) == {**EXPECTED, **given}
    if path == "/v1/responses":
        answer = post(served.app, path, **body).json()
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)


def test_a_request_may_have_more_tokens_than_the_default(served: Served) -> None:
    assert served.sent("/generate", prompt="was", max_tokens=9).params.max_tokens == 9


def test_scores_have_no_sampling(served: Served) -> None:
    request = served.sent("/v1/score", query="was", items=["fair"], label_token_ids=[5])
    assert request.params.repetition_penalty == 1.0 and request.params.temperature == 0.0


def test_python_has_the_defaults_only_where_it_gives_no_parameters(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        defaults = llm.get_default_sampling_params()
        assert {name: getattr(defaults, name) for name in EXPECTED} == EXPECTED
        assert len(llm.generate([[5]])[0].token_ids) <= 5
        assert len(llm.generate([[5]], SamplingParams(ignore_eos=True))[0].token_ids) == 16
    with LLM(str(folder), **OPTIONS, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
