"""The rules of `schedule()`, without blocks."""

Plan = dict[int, tuple[int, int]]


def predict_plans(
    prompt_lens: list[int], max_tokens: list[int], budget: int, max_num_seqs: int
) -> list[Plan]:
    """Return the positions that each plan computes, by request."""
    waiting = list(range(len(prompt_lens)))
    running: list[int] = []
    computed = [0] * len(prompt_lens)
    plans: list[Plan] = []
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        decodes = [r for r in running if computed[r] >= prompt_lens[r]]
        plan = {r: (computed[r], computed[r] + 1) for r in decodes}
        left = budget - len(decodes)
        for r in running:
            chunk = min(left, prompt_lens[r] - computed[r])
            if r not in decodes and chunk > 0:
                plan[r] = (computed[r], computed[r] + chunk)
                left -= chunk
        for r, (_, end) in plan.items():
            computed[r] = end
        plans.append(plan)
        running = [r for r in running if computed[r] < prompt_lens[r] + max_tokens[r] - 1]
    return plans
