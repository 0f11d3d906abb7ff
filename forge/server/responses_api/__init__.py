"""The API of /v1/responses, over the same engine requests as a chat."""
