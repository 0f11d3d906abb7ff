"""The OpenAI-compatible HTTP server, the only package to import starlette, uvicorn and pydantic."""
