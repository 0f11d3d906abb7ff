"""Metrics of a world: tokens in one delta arrive at one time."""

from __future__ import annotations

from math import ceil

import pytest

from forge.request import Delta
from forge.sim.draws import draw_uniform, exponential_ns
from forge.sim.metrics import QUANTILES, RESOLUTION, DurationHistogram, RunMetrics


def test_tokens_that_come_together_have_waited_once() -> None:
    """Two requests have their first token at 10; at 30 one gets three, the other two."""
    measures = RunMetrics()
    measures.record_arrival(7, 0, 1)
    measures.record_arrival(8, 4, 1)
    measures.record_deltas([Delta(7, 0, (1,)), Delta(8, 0, (1,))], 10)
    measures.record_deltas([Delta(7, 0, (1, 1, 1)), Delta(8, 0, (1, 1))], 30)
    first, between = measures.ttft, measures.itl
    assert (first.count, first.total_ns, first.max_ns) == (2, 16, 10)
    assert (between.count, between.total_ns, between.max_ns) == (5, 40, 20)
    assert between.quantile_ns(0.6) == 0.0 < between.quantile_ns(0.61)
    assert measures.num_output_tokens == 7


def test_a_delta_without_a_token_changes_nothing() -> None:
    """The request may have ended before, such as one that was refused its last step."""
    measures = RunMetrics()
    measures.record_deltas([Delta(7, 0)], 10)
    assert measures.num_output_tokens == measures.ttft.count == 0


def test_choices_of_one_request_that_gain_together_have_waited_once() -> None:
    """Two of them get a token each at 10, 20 and 30: of five waits three are 0."""
    measures = RunMetrics()
    measures.record_arrival(7, 0, 2)
    for now_ns in (10, 20, 30):
        measures.record_deltas([Delta(7, 0, (1,)), Delta(7, 1, (1,))], now_ns)
    between = measures.itl
    assert (between.count, between.total_ns) == (5, 20)
    assert between.quantile_ns(0.6) == 0.0 < between.quantile_ns(0.61)


def test_uniform_steps_are_counted_at_every_read() -> None:
    """One gets tokens at 10, 20 and 40; then another gets two with it, and at last it ends."""
    measures = RunMetrics()
    measures.record_arrival(7, 0, 1)
    measures.record_arrival(8, 5, 1)
    for now_ns, tokens, waits_ns in ((10, 1, 0), (20, 2, 10), (40, 3, 30)):
        measures.record_deltas([Delta(7, 0, (1,))], now_ns)
        assert (measures.num_output_tokens, measures.itl.total_ns) == (tokens, waits_ns)
    measures.record_deltas([Delta(7, 0, (1,))], 70)
    measures.record_deltas([Delta(7, 0, (1,)), Delta(8, 0, (1, 1))], 90)
    assert (measures.num_output_tokens, measures.itl.total_ns) == (7, 80)
    for now_ns in (95, 100):
        measures.record_deltas([Delta(7, 0, (1,)), Delta(8, 0, (1,))], now_ns)
    measures.record_finish(7, 100, "length")
    assert (measures.num_output_tokens, measures.itl.total_ns) == (11, 100)
    assert measures.latency.total_ns == 100


def test_tokens_of_uniform_steps_are_counted_at_every_read() -> None:
    measures = RunMetrics()
    measures.record_arrival(7, 0, 1)
    for now_ns in (10, 20, 30):
        measures.record_deltas([Delta(7, 0, (1,))], now_ns)
        measures.record_deltas([], now_ns + 1)
    assert measures.num_output_tokens == 3


def test_tokens_of_other_requests_end_a_run_of_uniform_steps() -> None:
    measures = RunMetrics()
    for request_id in (7, 8):
        measures.record_arrival(request_id, 0, 1)
    for now_ns in (10, 20):
        measures.record_deltas([Delta(7, 0, (1,)), Delta(8, 0, (1,))], now_ns)
    measures.record_decode_steps([7], [30])
    assert (measures.num_output_tokens, measures.itl.total_ns) == (5, 30)


@pytest.mark.parametrize("seed", range(20))
def test_a_quantile_is_within_its_resolution_and_between_minimum_and_maximum(
    seed: int,
) -> None:
    """Few times and many, of microseconds and of minutes, against a sorted list."""
    times = DurationHistogram()
    mean_ns = 10.0 ** (3 + seed % 8)
    waits = [exponential_ns(mean_ns, draw_uniform(seed, 60, i)) + 1 for i in range(1 + 7 * seed)]
    for wait_ns in waits:
        times.add(wait_ns)
    waits.sort()
    for share in (*QUANTILES, 1e-9, 1.0):
        found, exact = times.quantile_ns(share), waits[ceil(share * len(waits)) - 1]
        assert waits[0] <= found <= waits[-1]
        assert abs(found - exact) <= RESOLUTION * exact
    curve = times.cdf()
    assert waits[0] <= curve[0][0] and curve[-1][0] <= waits[-1]
    summary = times.summary()
    assert summary["p50"] <= summary["p90"] <= summary["p99"] <= summary["max"]


def test_of_equal_times_every_quantile_is_that_time() -> None:
    times = DurationHistogram()
    times.add(693_210_000, 5)
    assert [times.quantile_ns(share) for share in QUANTILES] == [693_210_000] * 3
    assert times.cdf() == [(693_210_000, 1.0)]
