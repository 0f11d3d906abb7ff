"""The environment of ranks: each has its own GPU first, and sees those of the others."""

from __future__ import annotations

import pytest

from forge.errors import InvalidConfig
from forge.models.rank_devices import RANK_VARIABLES, rank_environment


def test_each_rank_has_its_own_gpu_first() -> None:
    visible = [rank_environment(rank, 3, {})["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert visible == ["0,1,2", "1,0,2", "2,0,1"]


def test_the_starting_process_chooses_the_gpus() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "5,3,7"}
    visible = [rank_environment(rank, 2, chosen)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert visible == ["5,3", "3,5"]
    assert RANK_VARIABLES.items() <= rank_environment(1, 2, chosen).items()


def test_more_ranks_than_chosen_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidConfig, match=r"3 ranks need a GPU each.*has 2"):
        rank_environment(0, 3, {"CUDA_VISIBLE_DEVICES": "5,3"})
