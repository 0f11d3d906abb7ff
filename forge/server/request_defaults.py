"""RequestDefaults: fields that a server sets in requests of /v1/completions and chats.

Owns what the options change in a body. Knows no request model: the body is parsed afterwards.

    {"stream": true} ──► apply ──► {"stream": true, "stream_options": {...}} ──► parse_request
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RequestDefaults(NamedTuple):
    """Options of a server, by vLLM's names, that change the fields of a request.

    return_tokens_as_token_ids   value of this field in requests that have none
    enable_force_include_usage   every chunk of every stream has the usage
    enable_per_request_metrics   value of `return_metrics` in requests that have none
    """

    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False

    def apply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with the fields that the options set."""
        fields = dict(body)
        if self.return_tokens_as_token_ids and fields.get("return_tokens_as_token_ids") is None:
            fields["return_tokens_as_token_ids"] = True
        if self.enable_per_request_metrics and fields.get("return_metrics") is None:
            fields["return_metrics"] = True
        options = fields.get("stream_options")
        options = {} if options is None else options
        # Options that are no object are an error of the client, which parsing finds.
        if self.enable_force_include_usage and fields.get("stream") and isinstance(options, dict):
            usage = {"include_usage": True, "continuous_usage_stats": True}
            fields["stream_options"] = {**options, **usage}
        return fields


NO_DEFAULTS = RequestDefaults()
