"""Two and four processes that share a checkpoint over gloo: their tokens are those of one process.

One start of four processes runs every check. Weights are read in part, and sizes are agreed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.models.hf.loading.draft_pair import open_pair  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from tests.hf.forked_processes import fork_context  # noqa: E402
from tests.hf.gloo_rank import OPTIONS, OVERRIDES, Outcome, run_rank, serve  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
WORLD_SIZES = (4, 2)
RUNS = ((4, "model"), (2, "model"), (2, "pair"))
MAX_WAIT_S = 200


def run_ranks(store: Path, folder: Path) -> dict[tuple[int, str], list[Outcome]]:
    """Return the outcomes of all ranks by their number and by what was opened."""
    context = fork_context()
    num_ranks = max(WORLD_SIZES)
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(
            target=run_rank, args=(rank, WORLD_SIZES, str(store), str(folder), pipes[rank][1])
        )
        for rank in range(num_ranks)
    ]
    outcomes: dict[tuple[int, str], list[Outcome]] = {}
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        for world_size, kind in RUNS:
            for receiver, _ in pipes[:world_size]:
                assert receiver.poll(MAX_WAIT_S), "a rank does not answer"
                outcomes.setdefault((world_size, kind), []).append(receiver.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    return outcomes


def test_processes_over_gloo_serve_the_tokens_of_one_process(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = save_checkpoint(tmp_path / "saved")
    with open_model(str(folder), OVERRIDES, OPTIONS) as opened:
        alone = serve(opened)
    with open_pair(str(folder), str(folder), OVERRIDES, OPTIONS) as pair:
        assert serve(pair).tokens == alone.tokens
    expected = torch.tensor(alone.logits)
    for (world_size, kind), found in run_ranks(tmp_path / "store", folder).items():
        assert len(found) == world_size, kind
        assert [each.tokens for each in found] == [alone.tokens] * world_size
        assert not any(each.errors for each in found)
        assert len({each.num_blocks for each in found}) == 1
        logits = torch.cat([torch.tensor(each.logits) for each in found], 1)
        assert float((logits - expected).abs().max()) < 1e-4
