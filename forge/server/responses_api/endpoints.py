"""The routes of /v1/responses: create, stream, read, continue, cancel and delete responses.

Owns the stores of all tenants: when a response is put into one, and when it expires.

    POST   /v1/responses                   ──► a chat request ──► the engine ──► ResponseOutput
             previous_response_id ◄────────┐                                        │
    GET    /v1/responses/ID                ├── ResponseStore of the key's tenant ◄──┘
    GET    /v1/responses/ID/input_items    │     a whole response at its end, a stream from its
    POST   /v1/responses/ID/cancel         │     first event on; not with "store": false
    DELETE /v1/responses/ID                ┘

Always true: a response of another tenant is as unknown as one that never was.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.errors import InvalidRequest
from forge.server import chat, generation, routes
from forge.server.admission import AdmissionQueue
from forge.server.chat_fields import TranslatedChat
from forge.server.chat_formats import ChatFormats
from forge.server.errors import APIError, excerpt
from forge.server.json_route import handle_json
from forge.server.output_items import OutputItems
from forge.server.protocol import parse_request
from forge.server.request_head import RequestHead
from forge.server.responses_api.items import (
    Item,
    create_id,
    decode_items,
    encode_items,
    encode_object,
    parse_input,
)
from forge.server.responses_api.list_query import check_no_query, parse_list_query
from forge.server.responses_api.output import ResponseOutput
from forge.server.responses_api.request import ResponsesRequest
from forge.server.responses_api.store import ResponseStore, StoredResponse
from forge.server.responses_api.stream import ResponseEvents, ResponseRecorder
from forge.server.routes import APIRoute
from forge.server.served_model import ServedModel
from forge.server.streaming import GeneratedStream
from forge.server.time_slicing import run_in_slices


class Conversation(NamedTuple):
    """The conversation of a request, translated.

    chat    chat request of the whole conversation
    items   items of it, encoded; empty where the response is not stored
    head    JSON of the fields of the response that do not change
    """

    chat: TranslatedChat
    items: bytes
    head: str


class ResponsesEndpoints:
    """Handlers of the routes.

    num_tenants   tenants that share the bytes of the stores equally
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        served_model: ServedModel,
        formats: ChatFormats,
        num_tenants: int,
    ) -> None:
        self._queue = queue
        self._served_model = served_model
        self._formats = formats
        self._max_bytes = queue.limits.response_store_mib * 2**20 // num_tenants
        self._stores: dict[str, ResponseStore] = {}

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.RESPONSES.bind(POST=self.create),
            routes.RESPONSE.bind(GET=self.retrieve, DELETE=self.delete),
            routes.CANCEL_RESPONSE.bind(POST=self.cancel),
            routes.INPUT_ITEMS.bind(GET=self.input_items),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""

        def parse_body(body: dict[str, Any]) -> ResponsesRequest:
            request_body = parse_request(ResponsesRequest, body)
            self._served_model.check(request_body.model)
            return request_body

        return await handle_json(request, parse_body, self._create)

    async def _create(self, request_body: ResponsesRequest, head: RequestHead) -> Response:
        queue = self._queue
        queue.check_capacity(1)  # before the costly part
        is_stored = self._is_stored(request_body)
        previous = self._find_previous(request_body, head.tenant)
        # Texts may be long: a thread keeps the event loop free.
        chat_request, items, response_head = await asyncio.to_thread(
            self._translate, request_body, previous, is_stored
        )
        with chat_request.names.rename_errors():
            engine_request = await chat.build_request(
                queue, chat_request.request_body, head, self._formats
            )
        output = ResponseOutput(
            create_id("resp_"),
            response_head,
            len(engine_request.prompt),
            OutputItems.of_chat(
                chat_request.request_body,
                engine_request.prompt,
                queue.llm.tokenizer,
                self._formats,
            ),
            lambda: int(time.time()),
        )
        recorder = ResponseRecorder(output, items, self._store(head.tenant) if is_stored else None)
        if request_body.stream:
            encoder = ResponseEvents(output, recorder, lambda: queue.llm.abort(engine_request))
            return GeneratedStream(queue, (engine_request,), head.request_id, encoder)

        (engine_output,) = await generation.generate_outputs(
            queue, (engine_request,), head.request_id
        )
        await run_in_slices(output.add_output(engine_output))
        recorder.record_whole()
        return Response(output.encode(), media_type="application/json")

    def _is_stored(self, request_body: ResponsesRequest) -> bool:
        """Return whether the response is to be stored. Raises InvalidRequest."""
        if self._max_bytes == 0 and request_body.store:
            raise InvalidRequest(
                "store",
                "this server stores no responses",
                "Set it to false, and send the whole conversation each time",
                "unsupported_parameter",
            )
        return self._max_bytes > 0 and request_body.store is not False

    def _find_previous(self, request_body: ResponsesRequest, tenant: str) -> StoredResponse | None:
        """Return the response that the request continues. Raises APIError or InvalidRequest."""
        if request_body.previous_response_id is None:
            return None
        stored = self._find(tenant, request_body.previous_response_id, "previous_response_id", 400)
        if stored.cancel is not None:
            raise InvalidRequest(
                "previous_response_id", "the response is in progress", "Wait until it has ended"
            )
        return stored

    def _translate(
        self, request_body: ResponsesRequest, previous: StoredResponse | None, is_stored: bool
    ) -> Conversation:
        """Return the conversation of a request. Raises InvalidRequest. May be slow."""
        previous_items: list[Item] = []
        if previous is not None:
            previous_items = decode_items(previous.items) + decode_items(previous.output)
        items = parse_input(request_body.input)
        chat_request = request_body.translate(previous_items, items)
        response_head = {
            "created_at": int(time.time()),
            "model": self._served_model.name,
            **request_body.echo(self._queue.llm.get_default_sampling_params()),
        }
        encoded_head = encode_object(response_head)
        if not is_stored:
            return Conversation(chat_request, b"", encoded_head)
        encoded = encode_items([*previous_items, *items])
        num_bytes = len(encoded) + len(encoded_head)
        if num_bytes > self._max_bytes // 2:
            raise InvalidRequest(
                "input",
                f"with earlier turns and tools it has {num_bytes} bytes, and at most "
                f"{self._max_bytes // 2} are stored",
                "Set store to false, or start the server with a larger --response-store-mib",
                "string_too_long",
            )
        return Conversation(chat_request, encoded, encoded_head)

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/ID."""
        check_no_query(request.query_params)
        stored = self._find_of_request(request)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/ID. A stream of it continues."""
        response_id = request.path_params["id"]
        self._find_of_request(request)
        self._store(request.state.tenant).delete(response_id, _now_s())
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/ID/cancel. One that is cancelled already is returned as it is."""
        stored = self._find_of_request(request)
        if stored.cancel is not None:
            stored.cancel()
            stored = self._find_of_request(request)
        if stored.status != "cancelled":
            raise InvalidRequest(
                "id",
                "Cannot cancel a synchronous response",
                f"This one has ended, with the status '{stored.status}'. Only a stream that has "
                "not ended can be cancelled",
            )
        return Response(stored.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/ID/input_items."""
        query = parse_list_query(request.query_params)
        stored = self._find_of_request(request)
        items = await asyncio.to_thread(decode_items, stored.items)
        return JSONResponse(query.select(items))

    def _find_of_request(self, request: Request) -> StoredResponse:
        return self._find(request.state.tenant, request.path_params["id"], "id", 404)

    def _find(self, tenant: str, response_id: str, param: str, status: int) -> StoredResponse:
        """Return a response of the tenant. Raises APIError, the same for every unknown id.

        status   of the error: 404 where the id is the route's, as at OpenAI
        """
        stored = self._store(tenant).get(response_id, _now_s())
        if stored is None:
            raise APIError(
                status,
                "response_not_found",
                f"{param}: Response with id '{excerpt(response_id)}' not found. It was not stored, "
                "was deleted, or has been dropped for newer ones",
                param=param,
            )
        return stored

    def _store(self, tenant: str) -> ResponseStore:
        store = self._stores.get(tenant)
        if store is None:
            ttl_s = self._queue.limits.response_ttl
            if not self._stores:
                asyncio.get_running_loop().call_later(ttl_s, self._drop_expired)
            store = self._stores[tenant] = ResponseStore(self._max_bytes, ttl_s)
        return store

    def _drop_expired(self) -> None:
        """Drop the expired responses of all tenants, now and whenever the next ones expire."""
        now_s = _now_s()
        next_s = min(store.drop_expired(now_s) for store in self._stores.values())
        asyncio.get_running_loop().call_at(next_s, self._drop_expired)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
