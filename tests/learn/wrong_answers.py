"""Wrong answers: each is a reference with one change, and the hint that it must get.

A change replaces a text that occurs once in the reference.
"""

from __future__ import annotations

from typing import NamedTuple


class WrongAnswer(NamedTuple):
    """A change of the reference of an exercise, and a part of the hint that follows from it."""

    exercise: str
    name: str
    old: str
    new: str
    hint: str
    is_long: bool = False


WRONG_ANSWERS = (
    WrongAnswer("memory", "keys without values", "2 * model.num_kv", "model.num_kv", "and a value"),
    WrongAnswer(
        *("memory", "query heads", "model.num_kv_heads *", "model.num_heads *", "grouped-query"),
    ),
    WrongAnswer("memory", "one layer", "* model.num_layers *", "*", "Every layer"),
    WrongAnswer(
        *("memory", "no weights", "gpu.memory_bytes - weight_bytes", "gpu.memory_bytes"),
        "in the same memory",
    ),
    WrongAnswer("memory", "all memory", "MEMORY_SHARE * gpu", "gpu", "Only 90 %"),
    WrongAnswer(
        *("memory", "no context", "    num_bytes += num_rows * context_len * kv_bytes_per_token"),
        *("    0 * kv_bytes_per_token", "of its context"),
    ),
    WrongAnswer(
        *(
            "memory",
            "weights for each row",
            "1000 * num_bytes",
            "1000 * (num_bytes + (num_rows - 1) * BYTES_PER_VALUE * model.num_weights)",
            "why batches pay",
        ),
    ),
    WrongAnswer("memory", "seconds", "1000 * num_bytes", "num_bytes", "milliseconds"),
    WrongAnswer(
        *("memory", "head size of the first case", "num_kv_heads * model.head_dim"),
        *("num_kv_heads * 128", "next case are others"),
    ),
    WrongAnswer(
        *("memory", "KV heads of the first case", "2 * model.num_kv_heads", "2 * 8", "every size"),
    ),
    WrongAnswer(
        *("plans", "budget exceeded", "left = budget - len(decodes)", "left = budget"),
        "positions at most",
    ),
    WrongAnswer(
        *("plans", "decodes wait", "        plan = {r:"),
        "        decodes = decodes if len(decodes) == len(running) else []\n        plan = {r:",
        "Decodes come first",
    ),
    WrongAnswer(
        *("plans", "one token too many", "max_tokens[r] - 1]", "max_tokens[r]]"),
        "never an input",
    ),
    WrongAnswer(
        *("plans", "no slots", "waiting and len(running) < max_num_seqs", "waiting"),
        "run at most",
    ),
    WrongAnswer(
        *(
            "plans",
            "whole prompts",
            "and chunk > 0",
            "and (not plan or chunk == prompt_lens[r] - computed[r])",
        ),
        "in chunks",
    ),
    WrongAnswer(
        *("plans", "one slot too many", "waiting and len(running) < max_num_seqs"),
        *("waiting and len(running) <= max_num_seqs", "2 requests run at most"),
    ),
    WrongAnswer(
        *("plans", "last request first", "waiting.pop(0)", "waiting.pop()", "in their order"),
    ),
    WrongAnswer(
        *("plans", "empty chunks", "and chunk > 0:", "and chunk >= 0:", "leave it out"),
    ),
    WrongAnswer(
        *("plans", "floats", "plan = {r: (computed[r], computed[r] + 1)"),
        *("plan = {r: (computed[r], computed[r] + 1.0)", "two whole numbers"),
    ),
    WrongAnswer("plans", "no plans", "return plans", "return []", "computes something"),
    WrongAnswer("pool", "lookup over a gap", "break", "continue", "Stop at the first hash"),
    WrongAnswer(
        *("pool", "hash stays", "del self.block_by_hash[self.hash_by_block.pop(block)]"),
        *("self.hash_by_block.pop(block)", "remove its hash"),
    ),
    WrongAnswer("pool", "most recently used", "last=False", "last=True", "least recently used"),
    WrongAnswer("pool", "same list", "list(self.tables[seq_id])", "self.tables[seq_id]", "Copy it"),
    WrongAnswer(
        *("pool", "no reference", "        for block in self.tables[child_id]:\n"),
        *("        for block in ():\n", "count a reference"),
    ),
    WrongAnswer(
        *(
            "bug",
            "nothing is shared",
            "        if seq_id in self.tables:",
            "        shared = ()\n        if seq_id in self.tables:",
            "shares fewer blocks",
        ),
        is_long=True,
    ),
    WrongAnswer(
        *("bug", "forge's pool", "class Pool(BlockPool):", "Pool = BlockPool\nclass Other(Pool):"),
        "keep the other three",
    ),
    WrongAnswer(
        *(
            "bug",
            "a method less",
            "    def fork(self",
            "    def fork_(self",
            "does not define fork",
        ),
    ),
    WrongAnswer(
        *("bug", "root first", "self.free(table.blocks)", "self.free(table.blocks[::-1])"),
        "from its end",
        is_long=True,
    ),
    WrongAnswer(
        *("budget", "too small", "BATCHED_TOKENS = 900", "BATCHED_TOKENS = 256", "they queue"),
        is_long=True,
    ),
    WrongAnswer(
        *("budget", "too large", "BATCHED_TOKENS = 900", "BATCHED_TOKENS = 2048"),
        "how long may a step be",
        is_long=True,
    ),
    WrongAnswer(
        *("policy", "fcfs", "return next((each for each in waiting if fits(each, context)), None)"),
        *("return waiting[0]", "could start now"),
        is_long=True,
    ),
    WrongAnswer(
        *(
            "policy",
            "shortest prompt",
            "next((each for each in waiting if fits(each, context)), None)",
            "min(waiting, key=lambda each: (each.num_pending, each.id))",
            "starve",
        ),
        is_long=True,
    ),
    WrongAnswer(
        *("policy", "a low bound", "    return next("),
        "    if waiting[0].num_overtaken >= 8:\n        return waiting[0]\n    return next(",
        "closes the queue",
        is_long=True,
    ),
    WrongAnswer("acceptance", "p", "min(Fraction(1), p / q)", "p", "p alone"),
    WrongAnswer("acceptance", "no bound", "min(Fraction(1), p / q)", "p / q", "at most 1"),
    WrongAnswer(
        *("acceptance", "residual p", "max(Fraction(0), p[token] - q[token])", "p[token]"),
        "only what is missing",
    ),
    WrongAnswer(
        *("acceptance", "negative weights", "max(Fraction(0), p[token] - q[token])"),
        *("p[token] - q[token]", "negative"),
    ),
    WrongAnswer(
        *("acceptance", "one coin", "residual(p, q), replace_u", "residual(p, q), accept_u"),
        "Use replace_u",
    ),
    WrongAnswer(
        *("acceptance", "drafts without use", "    if accept_u < acceptance(p[draft], q[draft]):"),
        *("    return draw(p, replace_u)\n    if True:", "costs no step"),
        is_long=True,
    ),
    WrongAnswer(
        *("acceptance", "<=", "accept_u < acceptance", "accept_u <= acceptance", "stays exactly"),
        is_long=True,
    ),
    WrongAnswer(
        *(
            "depth",
            "depth 1",
            "for step in range(num_steps):\n        events",
            "depth = 1\n    for step in range(num_steps):\n        events",
            "while the device runs step n",
        ),
    ),
    WrongAnswer("depth", "a None", "return events", "return [*events, None]", "is a text"),
    WrongAnswer(
        *(
            "depth",
            "an event more",
            "return events",
            "return [*events, 'end']",
            "four of each step",
        ),
    ),
    WrongAnswer(
        "depth", "rules", '"b": "last token"', '"b": ["last token"]', "['last token'] is no rule"
    ),
    WrongAnswer("depth", "a rule", '"b": "last token"', '"b": "epoch"', "about to free"),
    WrongAnswer("depth", "no rule", '"b": "last token"', '"b": "luck"', "Use one of"),
    WrongAnswer(
        *("capacity", "too low", "return low", "return low / 2", "too low"),
        is_long=True,
    ),
    WrongAnswer(
        *("capacity", "6 % too low", "return low", "return low * 0.94", "interval is narrow"),
        is_long=True,
    ),
    WrongAnswer(
        *("capacity", "one limit", "and figures.itl_mean_ms <= max_itl_ms", "", "too high"),
        is_long=True,
    ),
    WrongAnswer(
        *("capacity", "linear search", "(low * high) ** 0.5", "low + 0.1", "Halve"),
        is_long=True,
    ),
    WrongAnswer(
        *("attention", "own maxima", "exp(each.top - top) for each", "1.0 for each", "common one"),
    ),
    WrongAnswer(
        *("attention", "first maximum", "max(each.top for each in parts)", "parts[0].top"),
        "largest of all maxima",
    ),
    WrongAnswer("attention", "not normalised", " / total\n", "\n", "divides the result"),
)
