"""Exhaustive exploration: every interleaving of a tiny world, with the scheduler that serves."""
