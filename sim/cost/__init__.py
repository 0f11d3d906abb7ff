"""Models of how long a step takes."""
