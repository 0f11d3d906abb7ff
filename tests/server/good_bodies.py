"""Good bodies of every route, with nearly every field that it has: what fuzzing damages."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, ANTHROPIC, SCORE = "/v1/responses", "/v1/messages", "/v1/score"
COUNT_TOKENS = f"{ANTHROPIC}/count_tokens"
NUM_BLOCKS = 1024
"""Blocks of the server that is sent these bodies."""
RESIZES = ("/resize_kv_cache", "/admin/resize")

SAMPLING: dict[str, Any] = {
    "model": "hash",
    "max_tokens": 2,
    "min_tokens": 0,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": -1.5, "7": 3},
    "allowed_token_ids": [5, 6, 7, 98],
    "seed": 7,
    "stop": ["end", "\n\n"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "priority": 1,
    "cache_salt": "salt",
    "user": "somebody",
    "request_id": "r-1",
    "return_timings": True,
    "metadata": {"a": "b"},
    "add_special_tokens": True,
}
STREAMED: dict[str, Any] = {
    "n": 2,
    "stream": True,
    "return_metrics": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[b-d]{1,3}$"},
        "e": {"$ref": "#/$defs/f"},
        "g": {"anyOf": [{"const": None}, {"enum": ["h", 1]}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"f": {"type": "array", "items": {"minimum": 0}, "maxItems": 2}},
}
STRUCTURES: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "i", "description": "j", "strict": True, "schema": SCHEMA},
    },
    "regex": "(red|green)( [^a-z]{1,3})?",
    "grammar": 'start: word (" " word)*\nword: /[a-c]+/ | "d" | %json {"type": "integer"}',
}
CALL: dict[str, Any] = {"name": "k", "arguments": '{"a": "b", "e": [1]}'}
TOOLS: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {"name": "k", "description": "l", "strict": True, "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "m", "parameters": {}}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "k"}},
    "parallel_tool_calls": False,
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
    {"role": "assistant", "content": "c", "tool_calls": []},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "e", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "d", "tool_call_id": "e"},
]
GENERATION_FIELDS: dict[str, Any] = {**SAMPLING, **STREAMED, **STRUCTURES}
CHAT_ONLY = ("stop", "request_id", "max_tokens", "user", "metadata", "add_special_tokens")
SHARED_FIELDS: dict[str, Any] = {
    **{name: value for name, value in SAMPLING.items() if name not in CHAT_ONLY},
    "stream": True,
    "session_id": "s",
    "session_end": True,
    "expected_pause_s": 1.5,
    "prompt_cache_key": "s",
    "chat_template_kwargs": {"enable_thinking": False},
}
"""Fields of a chat that /v1/responses and /v1/messages have too."""
ITEMS: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "c", "annotations": []}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "f"}]},
    {"type": "function_call", "call_id": "e", **CALL},
    {"type": "function_call_output", "call_id": "e", "output": "d"},
]
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "f", "signature": ""},
            {"type": "text", "text": "c", "citations": []},
            {"type": "tool_use", "id": "e", "name": "k", "input": {"a": "b", "e": [1]}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "e", "content": "d", "is_error": False},
            {"type": "text", "text": "g"},
        ],
    },
]
ANTHROPIC_FIELDS: dict[str, Any] = {
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "be brief"}],
    "stop_sequences": ["end", "\n\n"],
    "thinking": {"type": "enabled", "budget_tokens": 8, "display": "summarized"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "tools": [
        {"name": "k", "description": "l", "strict": True, "input_schema": SCHEMA},
        {"type": "custom", "name": "m", "input_schema": {"type": "object"}},
    ],
    "tool_choice": {"type": "tool", "name": "k", "disable_parallel_tool_use": True},
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "metadata": {"user_id": "somebody"},
    "mcp_servers": [],
    "service_tier": "auto",
    **SHARED_FIELDS,
    "max_tokens": 64,
}
RESPONSES_FIELDS: dict[str, Any] = {
    "input": ITEMS,
    "instructions": "be brief",
    "previous_response_id": "resp_0",
    "store": True,
    "max_output_tokens": 64,
    "tools": [
        {"type": "function", "name": "k", "description": "l", "strict": True, "parameters": SCHEMA},
        {"type": "function", "name": "m"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "k"}],
    },
    "parallel_tool_calls": False,
    "text": {
        "format": {"type": "json_schema", "name": "i", "strict": True, "schema": SCHEMA},
        "verbosity": "low",
    },
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "stream_options": {"include_obfuscation": False},
    "metadata": {"a": "b"},
    "max_tool_calls": 2,
    "prompt_cache_retention": "24h",
    "safety_identifier": "somebody",
    "service_tier": "auto",
    "user": "somebody",
    "truncation": "disabled",
    "background": False,
    **SHARED_FIELDS,
}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        **{"prompt": ["ab", "c"], "logprobs": 2, "echo": False, "logprob_token_ids": [5, 98]},
        **GENERATION_FIELDS,
    },
    CHAT: {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 64,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False,
        "add_generation_prompt": True,
        **GENERATION_FIELDS,
        **TOOLS,
        "max_tokens": 64,  # enough for a call
    },
    GENERATE: {"prompt": "abc", **SAMPLING, **STRUCTURES},
    RESPONSES: RESPONSES_FIELDS,
    ANTHROPIC: ANTHROPIC_FIELDS,
    COUNT_TOKENS: ANTHROPIC_FIELDS,
    SCORE: {
        **{"model": "hash", "query": "ab", "items": ["c", "d"], "label_token_ids": [98, 99]},
        **{"apply_softmax": True, "item_first": True, "priority": 1, "cache_salt": "salt"},
    },
    "/tokenize": {"model": "hash", "prompt": "abc", "add_special_tokens": True},
    "/detokenize": {"model": "hash", "tokens": [98, 99, 100]},
    "/admin/weights": {"files": ["model.safetensors"], "weight_version": "v"},
    "/admin/pause": {"mode": "keep"},
    "/admin/sleep": {"level": "1", "mode": "abort"},
    "/admin/resume": {},
    "/admin/wake": {},
    **{path: {"num_blocks": NUM_BLOCKS, "num_host_blocks": 0} for path in RESIZES},
}
CLIENT_ROUTES = {
    **{COMPLETIONS: 4, CHAT: 4, GENERATE: 3, RESPONSES: 4, ANTHROPIC: 4, COUNT_TOKENS: 1},
    **{SCORE: 2, "/tokenize": 1, "/detokenize": 1},
}
"""Routes of clients, and how often each is drawn."""
OPERATOR_ROUTES = {
    **{"/admin/weights": 3, "/admin/pause": 2, "/admin/sleep": 2, "/admin/resume": 1},
    **{"/admin/wake": 1, "/resize_kv_cache": 2, "/admin/resize": 2},
}
"""Routes that change the engine for everybody: each waits for the one before."""
QUERY_ROUTES = ("/admin/pause", "/admin/sleep", "/admin/resume", "/admin/wake")
"""Routes whose fields are parameters of a query."""
REQUIRED_FIELDS = (
    *("model", "prompt", "messages", "tokens", "max_tokens", "input", "max_output_tokens"),
    *("files", "num_blocks"),
)
OUTPUT_CONSTRAINTS = (*STRUCTURES, "text", "output_config", "tools")
"""Keys, of which a response has one."""
TOOL_ONLY_FIELDS = ("tool_choice", "parallel_tool_calls")
"""Fields without effect where there are no tools."""
