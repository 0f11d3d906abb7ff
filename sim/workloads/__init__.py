"""Requests to simulate: generated, from traces and from recordings."""
