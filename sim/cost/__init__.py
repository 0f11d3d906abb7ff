"""Cost models: how long each step takes."""
