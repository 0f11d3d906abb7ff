"""dspy: texts by chats and responses, typed fields by a schema, a chain of thought, async."""

# /// script
# dependencies = ["dspy==3.4.1"]
# ///

from __future__ import annotations

import asyncio
import os
from typing import Literal

from expected import KEY, MODEL, URL, chat, greedy, ids

# Otherwise it downloads a list of prices from GitHub.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
)

PROMPT = "Say more now"
QUESTION = "Is it warm in Rome?"


class Weather(dspy.Signature):
    """Answer a question about the weather."""

    question: str = dspy.InputField()
    city: Literal["Rome", "Oslo"] = dspy.OutputField()
    warm: bool = dspy.OutputField()


def register() -> None:
    """Declare the server: of an unknown model dspy assumes that it cannot follow a schema."""
    access = AccessPolicy(
        provider="forge",
        base_url=f"{URL}/v1",
        supports=EndpointSupport(complete=True, stream=True),
        auth_modes=("bearer",),
    )
    definition = ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm"))
    dspy.lm15.register_provider(definition, supports=ModelSupport(response_schema=True))


def create(model: str, **fields: object) -> dspy.LM:
    common = {"api_key": KEY, "cache": False, "num_retries": 0, "temperature": 0}
    return dspy.LM(model, max_tokens=400, **common, **fields)


def check_texts() -> None:
    known = greedy(chat(("user", PROMPT)), 400)
    address = f"{URL}/v1"
    for model in (
        create(f"forge/{MODEL}"),
        create(f"openai/{MODEL}", api_base=address),
        create(f"openai/{MODEL}", api_base=address, model_type="responses"),
    ):
        (answer,) = model(PROMPT)
        # A response may have reasoning too, so it is an object.
        text = answer["text"] if isinstance(answer, dict) else answer
        assert text == known.text, answer


def check_fields() -> None:
    """The model's text has no field, so dspy sends the request again with a schema."""
    for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
        with dspy.context(lm=create(f"forge/{MODEL}"), adapter=adapter):
            found = dspy.Predict(Weather)(question=QUESTION)
        assert found.city in ("Rome", "Oslo") and isinstance(found.warm, bool), found

    # The hash model would not end a text by itself: a quote is likely everywhere.
    model = create(f"forge/{MODEL}", logit_bias={str(*ids('"')): 100})
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.ChainOfThought(Weather)(question=QUESTION)
    assert isinstance(found.reasoning, str) and found.city in ("Rome", "Oslo"), found


async def check_async() -> None:
    predict = dspy.Predict(Weather)
    with dspy.context(lm=create(f"forge/{MODEL}"), adapter=dspy.JSONAdapter()):
        found = await asyncio.gather(*(predict.acall(question=f"{n}?") for n in range(8)))
    assert all(each.city in ("Rome", "Oslo") for each in found), found


def main() -> None:
    register()
    check_texts()
    check_fields()
    asyncio.run(check_async())


if __name__ == "__main__":
    main()
