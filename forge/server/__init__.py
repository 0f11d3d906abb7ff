"""The OpenAI-compatible HTTP server; alone in importing starlette, uvicorn and pydantic."""
