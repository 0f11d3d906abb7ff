"""A part of a start that fails on one rank fails on all, and no rank waits for another."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forge.errors import EngineDead, InvalidConfig  # noqa: E402
from forge.models.hf.loading.partition import WHOLE, ShardedModel  # noqa: E402
from forge.models.hf.parallel.agreement import MAX_TEXT_BYTES, raise_on_all  # noqa: E402
from tests.hf.thread_ranks import ThreadCommunicator, create_communicators, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
TOO_FEW = InvalidConfig("num_blocks", "größe " * 200, "Give less")


@pytest.mark.parametrize("failing", [{1}, {0, 2}, set()])
def test_an_error_of_one_rank_is_raised_by_all_after_the_context(failing: set[int]) -> None:
    """Errors are longer than what is sent of them, in letters of two bytes."""

    def start(communicator: ThreadCommunicator) -> tuple[bool, str]:
        reached_end = False
        try:
            with ShardedModel(communicator).raise_on_all(CPU):
                if communicator.rank in failing:
                    raise TOO_FEW
                reached_end = True
        except (InvalidConfig, EngineDead) as error:
            assert isinstance(error, InvalidConfig) is (communicator.rank in failing)
            return reached_end, str(error)[:40]
        return reached_end, ""

    communicators = create_communicators(3)
    found = run_ranks(communicators, start)
    assert [each.calls["all_gather"] for each in communicators] == [1, 1, 1]
    first = f"rank {min(failing, default=0)} failed: InvalidConfig: num_blocks: größe"
    for rank, (reached_end, error) in enumerate(found):
        assert reached_end is (rank not in failing)
        if rank in failing:
            assert error == str(TOO_FEW)[:40]
        else:
            assert error == (first[:40] if failing else "")


def test_the_text_of_an_error_without_a_message_is_not_empty() -> None:
    texts: list[str] = []

    def gather(text: str) -> list[str]:
        texts.append(text)
        return ["", text]

    with pytest.raises(ZeroDivisionError), raise_on_all(gather):
        raise ZeroDivisionError
    assert texts[0] and len(texts[0]) < MAX_TEXT_BYTES


def test_one_process_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError), WHOLE.raise_on_all(CPU):
        raise ZeroDivisionError
