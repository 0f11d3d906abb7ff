"""Small chunks: a step with decodes computes at most 256 tokens of prompts.

A step takes little longer than one of decodes alone, so tokens come evenly; first tokens come
later. Without decodes the whole budget is for prompts. See Agrawal et al. 2023 (Sarathi).
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext, Split, decodes_then_chunks

MAX_CHUNK_TOKENS = 256


def split_with_limit(
    budget: int, num_decodes: int, filling: Sequence[Candidate], context: PolicyContext
) -> Split:
    """Return every decode, then prompts in running order, up to MAX_CHUNK_TOKENS of them."""
    if num_decodes:
        budget = min(budget, num_decodes + MAX_CHUNK_TOKENS)
    return decodes_then_chunks(budget, num_decodes, filling, context)


policy = FCFS._replace(split=split_with_limit)
