"""Size a GPU: the highest rate at which both limits of a service hold.

`highest_rate` gets a function `simulate` and two limits. `simulate(rate)` runs the engine on a GPU
with that many requests a second, and returns two figures in milliseconds: the 99 % quantile of the
time to the first token, and the mean time between tokens. Both grow with the rate. Return the
highest rate, between 0.5 and 100 requests a second, at which neither is above its limit. 5 % are
close enough; a simulation is dear, so there are 14 of them.

The check draws GPUs, models, lengths and limits. Its GPUs are simulated: on a real one, half
precision needs compute capability 9.0. An example of the command that it runs:

    forge sim --cost roofline:rtx-4090,qwen3-4b --depth 2 --rate 8 --requests 60 \\
        --prompt 100-900 --output 64-192 --num-blocks 4500 --max-num-batched-tokens 512

For a GPU and a model of your own, `forge sim capacity` searches. Roofline costs are up to 43 % too
low for the first token (wiki/Capacity.md): rent with a margin.
"""

from collections.abc import Callable
from typing import NamedTuple


class Figures(NamedTuple):
    """Milliseconds: 99 % of requests to their first token, mean between tokens."""

    ttft_p99_ms: float
    itl_mean_ms: float


def highest_rate(
    simulate: Callable[[float], Figures], max_ttft_ms: float, max_itl_ms: float
) -> float:
    """Return the highest rate at which both figures are within their limits."""
    raise NotImplementedError
