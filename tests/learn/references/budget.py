"""A budget at which a step takes less than 30 ms, and prompts keep up with the arrivals."""

MAX_NUM_BATCHED_TOKENS = 900
