"""Every public method with values of wrong types: refused by name, and the engine goes on.

The calls are generated from the signatures, so a new method fails until it has arguments here.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

from forge.async_llm import AsyncLLM, AsyncLLMSession
from forge.engine_options import Options
from forge.errors import EnginePaused, ForgeError, InvalidConfig, InvalidWeights
from forge.llm import LLM, LLMSession, RequestFields
from forge.request import SamplingParams
from tests.engine.test_async_llm import TIMEOUT_S, run

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, float("nan"), b"abc", "\ud800", "", "x" * 1000),
    *([], [[]], (None,), {}, {1: 2}, {"a": {1}}, {3}, object(), threading.Lock(), lambda: 0),
    *(int, SamplingParams, iter([1]), [{"role": 3}], ["abc", 5]),
)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
CHAT = [{"role": "user", "content": "abc"}]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "generate": {"prompts": "abc", "params": SHORT, "use_tqdm": False},
    "chat": {
        **{"messages": CHAT, "params": SHORT, "tools": None, "chat_template_kwargs": None},
        **{"continue_final_message": False, "use_tqdm": False},
    },
    "stream": {"prompt": "abc", "params": SHORT},
    "session": {"session_id": "s"},
    "end_session": {"session_id": "s"},
    "pause": {"mode": "keep"},
    "resume": {},
    "update_weights": {"weights": {"seed": 0}, "version": None},
    "sleep": {"level": 1},
    "wake": {},
    "end": {},
    "get_default_sampling_params": {},
}
"""Method -> arguments with which it works. Each is replaced by each hostile value in turn."""

ASYNC_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{name: ARGUMENTS[name] for name in ("stream", "pause", "resume", "sleep", "wake", "end")},
    "get_default_sampling_params": {},
    "generate": {"prompt": "abc", "params": SHORT},
    "create_request": {"prompt": "abc", "params": SHORT},
    "stream_request": {"request": None},
    "abort": {"request": None},
    "session": {"session_id": "s", "tenant": ""},
    "end_session": {"session_id": "s", "tenant": ""},
    "reset_prefix_cache": {},
    "resize": {"num_blocks": None, "num_host_blocks": None},
    "update_weights": {"source": {"seed": 0}, "version": None},
    "add_observer": {"observer": None},
    "open_film": {},
    "close_film": {},
}

ENDS = {"close", "abort_all", "spawn"}
"""Methods that end an engine or open one."""

NAMES = {
    "prompts": r"prompts?",
    "messages": r"messages|prompt",
    "source": r"weights|.*",
    "weights": r"weights|.*",
    "version": r"weight_version|weights",
    "tools": r"tools|messages",
    "chat_template_kwargs": r"chat_template_kwargs|messages",
}
"""Argument -> what an error may call it, where that is another name: a tensor is named itself."""


def methods_of(*types: type) -> set[str]:
    return {
        name
        for each in types
        for name, member in vars(each).items()
        if name[0] != "_" and (callable(member) or isinstance(member, classmethod))
    }


def test_every_public_method_has_arguments() -> None:
    assert methods_of(LLM, LLMSession) - ENDS == ARGUMENTS.keys()
    assert methods_of(AsyncLLM, AsyncLLMSession) - ENDS == ASYNC_ARGUMENTS.keys()
    for owner, arguments in ((LLM, ARGUMENTS), (AsyncLLM, ASYNC_ARGUMENTS)):
        for name in methods_of(owner) - ENDS:
            parameters = inspect.signature(getattr(owner, name)).parameters.values()
            named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            assert named == ["self", *arguments[name]], name


def hostile_calls(owner: type, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each argument of a method with its calls, fields of a request included."""
    arguments = (ASYNC_ARGUMENTS if owner in (AsyncLLM, AsyncLLMSession) else ARGUMENTS)[name]
    fields: list[str] = []
    if "fields" in inspect.signature(getattr(owner, name)).parameters:
        fields = [each for each in get_type_hints(RequestFields) if each != "tenant"]
    for argument in (*arguments, *fields):
        for value in HOSTILE:
            yield argument, {**arguments, argument: value}


def check_refusal(error: BaseException, argument: str, call: object) -> None:
    """Check that the error names the argument, or the state that refuses any."""
    assert isinstance(error, ForgeError), (call, repr(error))
    pattern = NAMES.get(argument, argument)
    named = re.match(rf"(params\[\d+\]\.)?({pattern})\b", str(error))
    assert named or isinstance(error, EnginePaused), (argument, str(error))


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_llm_refuses_hostile_values_by_name_and_goes_on(name: str) -> None:
    with LLM("hash", num_blocks=64) as llm:
        (expected,) = llm.generate("abc", SHORT)
        owner: Any = LLMSession if name == "end" else LLM
        for argument, arguments in hostile_calls(owner, name):
            try:
                result = getattr(llm.session("s") if owner is LLMSession else llm, name)(
                    **arguments
                )
                if name == "stream":
                    list(result)
                if name == "session":
                    result.generate("abc", SHORT)
            except BaseException as error:
                check_refusal(error, argument, (name, arguments))
            llm.resume()
        llm.update_weights({"seed": 0}, "the end")
        (output,) = llm.generate("abc", SHORT)
        assert output.token_ids == expected.token_ids
        assert not llm.engine.has_work


async def call_async(llm: AsyncLLM, name: str, arguments: dict[str, Any]) -> None:
    owner = llm.session("s") if name == "end" else llm
    result = getattr(owner, name)(**arguments)
    if name in ("stream", "stream_request"):
        async for _ in result:
            pass
    elif name == "session":
        await result.generate("abc", SHORT)
    elif inspect.isawaitable(result):
        await result


@pytest.mark.parametrize("name", sorted(ASYNC_ARGUMENTS))
@pytest.mark.parametrize(
    "opener", [AsyncLLM, pytest.param(AsyncLLM.spawn, marks=pytest.mark.long)], ids=str
)
def test_an_async_llm_refuses_hostile_values_by_name_and_goes_on(
    opener: Callable[..., AsyncLLM], name: str
) -> None:
    async def call_all(llm: AsyncLLM) -> None:
        expected = await llm.generate("abc", SHORT)
        owner: Any = AsyncLLMSession if name == "end" else AsyncLLM
        for argument, arguments in hostile_calls(owner, name):
            try:
                await asyncio.wait_for(call_async(llm, name, arguments), TIMEOUT_S)
            except BaseException as error:
                check_refusal(error, argument, (name, arguments))
            await llm.resume()
        output = await llm.generate("abc", SHORT)
        assert len(output.token_ids) == len(expected.token_ids)
        assert not llm.num_open_requests

    llm = opener("hash", num_blocks=64)
    try:
        run(call_all(llm))
    finally:
        llm.close()


@pytest.mark.parametrize("option", ["model", "policy", *Options.__annotations__])
def test_an_llm_refuses_hostile_options_by_name(option: str) -> None:
    for value in HOSTILE:
        options: dict[str, Any] = {"model": "hash", option: value}
        try:
            LLM(**options).close()
        except InvalidConfig as error:
            assert str(error).startswith(f"{option}: "), (value, str(error))


class _RaisingTensor:
    """Tensor of a trainer that is gone when it is read."""

    def detach(self) -> object:
        raise LookupError("the trainer has freed it")


def test_a_source_that_raises_changes_nothing() -> None:
    async def update() -> None:
        expected = (await llm.generate("abc", SHORT)).token_ids
        with pytest.raises(InvalidWeights, match="LookupError: the trainer has freed it"):
            await llm.update_weights({"model.norm.weight": _RaisingTensor()})
        assert (await llm.generate("abc", SHORT)).token_ids == expected

    llm = AsyncLLM("tiny")
    try:
        run(update())
    finally:
        llm.close()
