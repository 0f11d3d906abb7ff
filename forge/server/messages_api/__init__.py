"""Anthropic's API of /v1/messages, over the same engine requests as a chat."""
