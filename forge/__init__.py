"""forge: an LLM serving engine."""
