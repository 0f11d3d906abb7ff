"""Predict the plans of a small run: which positions does each step compute?

All requests are there before the first plan, in the order 0, 1, 2, ... and blocks are never short.
Write the rules of `schedule()` as a function that returns every plan until all have ended. A plan
maps a request to the positions [start, end) that it computes for it:

    predict_plans([3, 14, 2], [4, 4, 4], budget=8, max_num_seqs=3)[0] == {0: (0, 3), 1: (0, 5)}

The rules: at most `max_num_seqs` requests run, and a slot is free again once its request has ended.
A request that has sampled its first token gets one position in every plan. What these leave of
`budget` goes to the prompts of the running requests, in their order, in chunks of any size. The
step that computes a prompt's last position samples the first token; a sampled token is the input of
the next step. A request ends with its `max_tokens`-th token.

wiki/Scheduling.md has these rules with their reasons. The check runs the real scheduler on drawn
lengths.
"""

Plan = dict[int, tuple[int, int]]


def predict_plans(
    prompt_lens: list[int], max_tokens: list[int], budget: int, max_num_seqs: int
) -> list[Plan]:
    """Return the positions that each plan computes, by request."""
    raise NotImplementedError
