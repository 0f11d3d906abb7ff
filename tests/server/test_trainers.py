"""Routes of trainers: their key, the files that they read, and outputs after updates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig, InvalidWeights
from forge.outputs import TextDelta
from forge.request import Request, SamplingParams, TokenLogprob
from forge.server.app import create_app
from forge.server.completions import CompletionRequest, CompletionResponse
from forge.server.protocol import NamedPrompt, parse_request
from forge.server.routes import ADMIN_ROUTES
from forge.tokenizer import ByteTokenizer
from forge.trainer_access import TrainerAccess
from tests.server.test_server import parse_chunks

ADMIN = {"authorization": "Bearer admin"}
CLIENT = {"authorization": "Bearer client"}
ADMIN_PATHS = {spec.path for spec in ADMIN_ROUTES}
BODY = {"model": "hash:seed=1", "prompt": "Once upon", "temperature": 0, "ignore_eos": True}
TIMEOUT_S = 20.0


def save_seed(path: Path, seed: int) -> Path:
    """Write a file of the model hash: safetensors, which has its header's length first."""
    entry = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    header = json.dumps({"seed": entry}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + seed.to_bytes(8, "little", signed=True)
    )
    return path


@asynccontextmanager
async def open_app(
    access: Path | TrainerAccess | None,
    kind: Callable[..., AsyncLLM] = AsyncLLM,
    **options: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve hash:seed=1 with a client's key, and the routes of trainers if they have access."""
    if isinstance(access, Path):
        access = TrainerAccess("admin", access.resolve())
    async with kind("hash:seed=1", **options) as llm:
        app = create_app(llm, api_keys=("client",), trainer_access=access)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=TIMEOUT_S
        ) as client:
            yield client


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


async def complete(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/completions", json={**BODY, **fields}, headers=CLIENT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def command(client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
    answer = await client.post(path, json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_the_option_there_are_no_routes() -> None:
    async def test() -> None:
        async with open_app(None) as client:
            for path in ADMIN_PATHS:
                assert (await client.post(path, headers=ADMIN)).status_code == 401
                answer = await client.post(path, headers=CLIENT)
                assert answer.status_code == 404
                assert answer.json()["error"]["code"] == "not_found"

    run(test())


def test_each_key_opens_its_own_routes_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_app(tmp_path) as client:
            for path in ADMIN_PATHS:
                for method in ("GET", "POST", "HEAD", "DELETE"):
                    for headers in ({}, CLIENT):
                        answer = await client.request(method, path, headers=headers)
                        assert answer.status_code == 401, (method, path)
            answer = await client.post("/v1/completions", json=BODY, headers=ADMIN)
            assert answer.status_code == 401
            page = {**ADMIN, "origin": "http://evil.example"}
            assert (await client.post("/admin/pause", headers=page)).status_code == 403
            form = {**ADMIN, "content-type": "application/x-www-form-urlencoded"}
            assert (await client.post("/admin/pause", headers=form)).status_code == 415
            assert not (await client.get("/admin/pause", headers=ADMIN)).json()["is_paused"]
            answer = await client.delete("/admin/pause", headers=ADMIN)
            assert answer.status_code == 405
            assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
            document = (await client.get("/openapi.json", headers=CLIENT)).json()
            assert not ADMIN_PATHS & document["paths"].keys()

    run(test())


@pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_requests_of_a_pause_wait_and_get_the_new_weights(
    tmp_path: Path, kind: Callable[..., AsyncLLM]
) -> None:
    save_seed(tmp_path / "step-40" / "model.safetensors", 7)

    async def test() -> None:
        async with open_app(tmp_path, kind) as client:
            old = await complete(client, max_tokens=8)
            assert "weight_version" not in old and "num_stale_tokens" not in old
            paused = await command(client, "/admin/pause?mode=keep")
            assert paused == {"status": "paused", "weight_version": "0"}
            waiting = asyncio.create_task(complete(client, max_tokens=8))
            body = {"files": ["step-40/model.safetensors"], "weight_version": "40"}
            updated = await command(client, "/admin/weights", body)
            assert updated["weight_version"] == "40" and updated["seconds"].keys() == {"update"}
            state = (await client.get("/admin/pause", headers=ADMIN)).json()
            assert state == {"is_paused": True, "mode": "keep", "weight_version": "40"}
            assert not waiting.done()
            await command(client, "/admin/resume")
            new = await waiting
            assert new["text"] != old["text"]
            assert (new["weight_version"], new["num_stale_tokens"]) == ("40", 0)
            streamed = await client.post(
                "/v1/completions", json={**BODY, "max_tokens": 8, "stream": True}, headers=CLIENT
            )
            chunks = parse_chunks(streamed.text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == new["text"]
            assert chunks[-1]["choices"][0]["weight_version"] == "40"
            own = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0}
            generated = await client.post("/generate", json=own, headers=CLIENT)
            assert generated.json()["weight_version"] == "40"
            async with AsyncLLM("hash:seed=7") as fresh:
                params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
                assert (await fresh.generate("Once upon", params)).text == new["text"]

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_choice_ends_with_its_weights_from_the_first_update_on(
    path: str, tmp_path: Path
) -> None:
    """In the body and in the last chunk of each choice, with the same fields."""
    save_seed(tmp_path / "new.safetensors", 7)
    request = {**BODY, "max_tokens": 3, "n": 2, "temperature": 1, "return_token_ids": True}
    if path == "/v1/chat/completions":
        del request["prompt"]
        request["messages"] = [{"role": "user", "content": "hi"}]
    names = {"weight_version", "num_stale_tokens"}

    async def answers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        """Return the choices of a body, and those of a stream's chunks that have a reason."""
        body = await client.post(path, json=request, headers=CLIENT)
        stream = await client.post(path, json={**request, "stream": True}, headers=CLIENT)
        assert (body.status_code, stream.status_code) == (200, 200), body.text
        choices = [choice for chunk in parse_chunks(stream.text) for choice in chunk["choices"]]
        ends = [choice for choice in choices if choice["finish_reason"] is not None]
        assert len(ends) == 2
        assert not any(names & choice.keys() for choice in choices if choice not in ends)
        return [*body.json()["choices"], *ends]

    async def test() -> None:
        async with open_app(tmp_path) as client:
            assert not any(names & choice.keys() for choice in await answers(client))
            body = {"files": ["new.safetensors"], "weight_version": "40"}
            await command(client, "/admin/weights", body)
            assert [
                (choice["weight_version"], choice["num_stale_tokens"])
                for choice in await answers(client)
            ] == [("40", 0)] * 4

    run(test())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ],
)
def test_a_response_and_a_message_have_the_weights_of_their_output(
    path: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """In the body, and in the last event of a stream that has their fields; none before."""
    save_seed(tmp_path / "new.safetensors", 7)
    request = {"model": BODY["model"], "ignore_eos": True, **fields}
    names = ("weight_version", "num_stale_tokens")

    async def answers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        """Return the body, and the fields of the last event of a stream; earlier ones have none."""
        body = await client.post(path, json=request, headers=CLIENT)
        stream = await client.post(path, json={**request, "stream": True}, headers=CLIENT)
        assert (body.status_code, stream.status_code) == (200, 200), body.text
        lines = [line for line in stream.text.splitlines() if line.startswith("data: ")]
        ends = [line for line in lines if any(name in line for name in names)]
        last = json.loads(lines[-2 if path == "/v1/messages" else -1].removeprefix("data: "))
        assert ends in ([], [f"data: {json.dumps(last, separators=(',', ':'))}"])
        return [body.json(), last.get("response") or last["delta"]]

    async def test() -> None:
        async with open_app(tmp_path) as client:
            assert not any(name in each for each in await answers(client) for name in names)
            body = {"files": ["new.safetensors"], "weight_version": "40"}
            await command(client, "/admin/weights", body)
            for each in await answers(client):
                assert [each[name] for name in names] == ["40", 0]

    run(test())


def test_a_pause_that_aborts_returns_the_tokens_so_far(tmp_path: Path) -> None:
    """In the middle of an output, of a stream and of a chat."""

    async def test() -> None:
        async with open_app(tmp_path) as client:
            request = {**BODY, "max_tokens": 4000, "stream": True}
            chat = {
                **{name: request[name] for name in ("model", "temperature", "ignore_eos")},
                "max_tokens": 4000,
                "messages": [{"role": "user", "content": "hi"}],
            }
            tasks = [
                asyncio.create_task(client.post(path, json=body, headers=CLIENT))
                for path, body in (
                    ("/v1/completions", request),
                    ("/v1/completions", {**request, "stream": False}),
                    ("/v1/chat/completions", chat),
                )
            ]
            while (await client.get("/healthz")).json()["running"] < 3:
                await asyncio.sleep(0.001)
            await command(client, "/admin/pause")
            answers = [await task for task in tasks]
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            last = parse_chunks(answers[0].text)[-1]
            assert last["choices"][0]["finish_reason"] == "abort"
            assert answers[0].text.endswith("data: [DONE]\n\n")
            for answer in answers[1:]:
                body = answer.json()
                assert body["choices"][0]["finish_reason"] == "abort"
                assert 0 < body["usage"]["completion_tokens"] < 4000
            await command(client, "/admin/resume")
            assert (await complete(client, max_tokens=3))["finish_reason"] == "length"

    run(test())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_echo_whose_log_probabilities_a_pause_cuts_ends_as_aborted(
    order: tuple[int, int],
) -> None:
    """Deltas wait for the log probabilities of the whole prompt, and here no more come."""
    body = parse_request(CompletionRequest, {"prompt": "abc", "echo": True, "logprobs": 0, "n": 2})
    request = Request(0, (98, 99, 100), SamplingParams(n=2, logprobs=0, prompt_logprobs=0))
    prompts = [NamedPrompt("prompt", "abc")]
    response = CompletionResponse(body, prompts, [request], ByteTokenizer(), {"id": "a"})
    scores = TokenLogprob(99, -1.0, ())
    assert not [*response.chunks(0, TextDelta(0, "", (), prompt_logprobs=(scores,)))]
    chunks = []
    for choice in order:
        chunks += response.chunks(0, TextDelta(choice, "", (), "abort"))
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "abc"
        assert own[-1]["finish_reason"] == "abort"
        assert [name for choice in own for name in choice["logprobs"]["tokens"]] == ["a", "b"]


def test_an_output_that_a_pause_aborts_is_not_reported_as_finished(tmp_path: Path) -> None:
    """A response is cancelled; a message, which has no stop reason for it, is an error."""

    async def test() -> None:
        async with open_app(tmp_path) as client:
            head = {"model": BODY["model"], "temperature": 0, "ignore_eos": True}
            response = {**head, "input": "hi", "max_output_tokens": 4000}
            user = [{"role": "user", "content": "hi"}]
            message = {**head, "messages": user, "max_tokens": 4000}
            tasks = [
                asyncio.create_task(
                    client.post(path, json={**body, "stream": is_stream}, headers=CLIENT)
                )
                for path, body in (("/v1/responses", response), ("/v1/messages", message))
                for is_stream in (False, True)
            ]
            while (await client.get("/healthz")).json()["running"] < len(tasks):
                await asyncio.sleep(0.001)
            await command(client, "/admin/pause")
            whole, stream, error, error_stream = [await task for task in tasks]
            name, data = stream.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
            assert name == "event: response.incomplete"
            for found in (whole.json(), json.loads(data.removeprefix("data: "))["response"]):
                assert (found["status"], found["completed_at"]) == ("cancelled", None)
                assert found["incomplete_details"] is None
                assert found["output"][-1]["status"] == "incomplete"
            assert error.status_code == 503
            last = error_stream.text.removesuffix("\n\n").split("\n\n")[-1]
            if error_stream.status_code == 200:
                name, last = last.split("\n")
                assert name == "event: error"
            for text in (error.text, last.removeprefix("data: ")):
                found = json.loads(text)["error"]
                assert found["type"] == "overloaded_error" and "pause" in found["message"]

    run(test())


def test_a_sleep_is_refused_or_carried_out_by_name(tmp_path: Path) -> None:
    save_seed(tmp_path / "new.safetensors", 7)

    async def test() -> None:
        async with open_app(tmp_path) as client:
            answer = await client.post("/admin/wake", headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engine_paused")
            assert (await command(client, "/admin/sleep?level=2"))["seconds"] == {"kv_cache": 0.0}
            assert (await client.get("/admin/sleep", headers=ADMIN)).json() == {"is_sleeping": True}
            assert (await client.post("/admin/resume", headers=ADMIN)).status_code == 409
            await command(client, "/admin/wake")
            answer = await client.post("/admin/resume", headers=ADMIN)
            assert "Update them all" in answer.json()["error"]["message"]
            await command(client, "/admin/weights", {"files": ["new.safetensors"]})
            await command(client, "/admin/resume")
            assert (await complete(client, max_tokens=3))["weight_version"] == "1"
            for query in (
                "/admin/sleep?level=3",
                "/admin/pause?mode=never",
                "/admin/pause?tags=weights",
            ):
                assert (await client.post(query, headers=ADMIN)).status_code == 400

    run(test())


def test_weights_without_a_folder_are_refused_with_the_option() -> None:
    async def test() -> None:
        async with open_app(TrainerAccess("admin", None)) as client:
            answer = await client.post("/admin/weights", json={"files": ["x"]}, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_weights")
            assert "--weights-folder" in answer.json()["error"]["message"]
            await command(client, "/admin/pause")
            await command(client, "/admin/resume")

    run(test())


def test_the_cache_is_resized_in_a_pause() -> None:
    async def test() -> None:
        async with open_app(TrainerAccess("admin", None), num_blocks=64) as client:
            await command(client, "/admin/pause?mode=keep")
            for body, status in (({"num_blocks": 9}, 200), ({}, 400), ({"num_blocks": 0}, 400)):
                answer = await client.post("/admin/resize", json=body, headers=ADMIN)
                assert answer.status_code == status, answer.text
            await command(client, "/admin/resume")
            load = (await client.get("/load", headers=CLIENT)).json()
            assert load["kv_blocks_total"] == 9

    run(test())


def test_only_files_of_the_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    inside = save_seed(folder / "step" / "model.safetensors", 3)
    outside = save_seed(tmp_path / "outside.safetensors", 4)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "near.safetensors").symlink_to(inside)
    (folder / "folder.safetensors").mkdir()
    (folder / "model.pt").write_bytes(b"\x80\x04.")
    (tmp_path / "weights-other").mkdir()
    save_seed(tmp_path / "weights-other" / "model.safetensors", 5)
    access = TrainerAccess("admin", folder.resolve())
    good = access.find_files(["step/model.safetensors", "near.safetensors"])
    assert good.paths == (str(inside.resolve()),) * 2
    for name in (
        "../outside.safetensors",
        str(outside),
        str(inside),
        "link.safetensors",
        "folder.safetensors",
        "model.pt",
        "step",
        "",
        "none.safetensors",
        "../weights-other/model.safetensors",
        "step/model.safetensors\0",
        "a" * 5000,
        "a" * 300 + ".safetensors",
        "a\n\x1b[2J.safetensors",
        "é.pt",
    ):
        with pytest.raises(InvalidWeights, match="Name a file relative") as error:
            access.find_files([name])
        assert str(error.value).isascii() and str(error.value).isprintable()
    with pytest.raises(InvalidWeights, match="Give 1 to 256"):
        access.find_files([])
    with pytest.raises(InvalidWeights, match="no folder of weights"):
        TrainerAccess("admin", None).find_files(["step/model.safetensors"])


def test_a_damaged_file_is_named_and_changes_nothing(tmp_path: Path) -> None:
    cut = save_seed(tmp_path / "cut.safetensors", 3)
    cut.write_bytes(cut.read_bytes()[:-1])

    async def test() -> None:
        async with open_app(tmp_path) as client:
            for files in (["cut.safetensors"], ["../secret"], None, "cut.safetensors"):
                answer = await client.post("/admin/weights", json={"files": files}, headers=ADMIN)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "files"
            assert "weight_version" not in await complete(client, max_tokens=3)

    run(test())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_folder": "x"}, "weights_folder: .* Give admin_key too"),
        ({"admin_key": ""}, "admin_key: it is empty. Set FORGE_ADMIN_KEY"),
        ({"admin_key": "client"}, "a client's key too"),
        ({"admin_key": "x", "weights_folder": "/none"}, "there is no folder"),
    ],
)
def test_options_that_give_no_safe_access_are_refused(
    options: dict[str, Any], message: str
) -> None:
    defaults = {"admin_key": None, "weights_folder": None, "api_keys": ("client",)}
    with pytest.raises(InvalidConfig, match=message):
        TrainerAccess.from_options(**(defaults | options))


def test_the_answer_says_nothing_of_files_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_seed(tmp_path / "outside.safetensors", 4)
    (folder / "loop").symlink_to(folder / "loop")
    access = TrainerAccess("admin", folder.resolve())
    problems = {}
    for name in ("../outside.safetensors", "../none.safetensors", "loop"):
        with pytest.raises(InvalidWeights) as error:
            access.find_files([name])
        problems[name] = str(error.value).partition(": ")[2]
    assert problems["../outside.safetensors"] == problems["../none.safetensors"]


def test_a_clients_key_opens_no_admin_route_of_a_mounted_app() -> None:
    llm = AsyncLLM("hash", num_blocks=64)
    app = create_app(llm, api_keys=("client",), trainer_access=TrainerAccess("admin", None))
    with TestClient(Starlette(routes=[Mount("/llm", app)]), base_url="http://localhost") as client:
        codes = [
            client.post("/llm/admin/resume", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("client", "admin")
        ]
    llm.close()
    assert codes == [401, 200]
