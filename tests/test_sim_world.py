"""What a world tells its measures: tokens that come together have come at once."""

from __future__ import annotations

from forge.request import Delta
from sim.measures import Measures


def test_tokens_that_come_together_have_waited_once() -> None:
    """Two requests have their first token at 10; at 30 one gains three, the other two."""
    measures = Measures()
    measures.arrive(7, 0, 1)
    measures.arrive(8, 4, 1)
    measures.gain([Delta(7, 0, (1,)), Delta(8, 0, (1,))], 10)
    measures.gain([Delta(7, 0, (1, 1, 1)), Delta(8, 0, (1, 1))], 30)
    first, between = measures.first_token, measures.between_tokens
    assert (first.count, first.total_ns, first.most_ns) == (2, 16, 10)
    assert (between.count, between.total_ns, between.most_ns) == (5, 40, 20)
    assert between.quantile_ns(0.6) == 0.0 < between.quantile_ns(0.61)
    assert measures.output_tokens == 7


def test_a_delta_without_a_token_changes_nothing() -> None:
    """The request may have ended before, as one that was refused its last step."""
    measures = Measures()
    measures.gain([Delta(7, 0)], 10)
    assert measures.output_tokens == measures.first_token.count == 0
