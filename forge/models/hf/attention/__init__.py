"""Attend to the paged KV cache."""
