"""Cost specs: the cost model that a text names.

Owns the notation of `--cost`. Knows no scenario and no clock.

    unit   affine:6000,20,25   roofline:h200,qwen3-4b   FILE.json   noisy:FILE.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.seam import StepPlan
from forge.sim.cost.calibration_file import read_calibration
from forge.sim.cost.model import CostModel
from forge.sim.cost.noise import NoisyCost
from forge.sim.cost.roofline import num_blocks_that_fit, parse_gpu_and_shape, parse_roofline
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.cost.table import TableCost


def _parse_unit(text: str) -> CostModel:
    return ConstantCost()


def _parse_affine(text: str) -> CostModel:
    try:
        base, row, token = (round(1000 * float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        base = row = token = -1
    if base < 1 or row < 0 or token < 0:
        raise InvalidConfig(
            "cost", f"'affine:{text[:64]}' is not three numbers", "Give affine:6000,20,25, say"
        )
    return AffineCost(base, row, token)


COST_PARSERS: dict[str, Callable[[str], CostModel]] = {
    "unit": _parse_unit,
    "affine": _parse_affine,
    "roofline": parse_roofline,
}
"""The word before the colon -> the parser of the text after it."""

NOISY_PREFIX = "noisy:"


def calibration_path(text: str) -> Path | None:
    """Return the calibration file that a cost spec names, or None."""
    name = text.removeprefix(NOISY_PREFIX)
    return Path(name) if name.endswith(".json") else None


def parse_cost(text: str, engine: EngineConfig | None = None) -> CostModel:
    """Return the cost model that the text names. Raises InvalidConfig.

    unit                               every step takes a millisecond
    affine:BASE_US,ROW_US,TOKEN_US     microseconds of a step, of each row and of each token
    roofline:GPU,MODEL                 from figures of a GPU and a model: forge.sim.cost.roofline
    FILE.json                          from a calibration: forge.sim.cost.calibration_file
    noisy:FILE.json                    the same, with the noise that was measured

    engine    a calibration that does not cover this engine is refused
    """
    file = calibration_path(text)
    if file is not None:
        calibration = read_calibration(file)
        if engine is not None:
            calibration.check_engine(engine, str(file))
        table = calibration.create_cost()
        return NoisyCost(table, calibration.residuals) if text.startswith(NOISY_PREFIX) else table
    kind, _, rest = text.partition(":")
    if kind not in COST_PARSERS:
        names = ", ".join((*COST_PARSERS, "FILE.json", f"{NOISY_PREFIX}FILE.json"))
        raise InvalidConfig("cost", f"{text[:64]!r} is not known", f"Use one of: {names}")
    return COST_PARSERS[kind](rest)


def cost_num_blocks(text: str, utilization: float, block_size: int) -> int:
    """Return the blocks that fit on the GPU of `roofline:GPU,MODEL`. Raises InvalidConfig.

    utilization   share of the GPU's memory for weights, steps and cache
    """
    name = "gpu_memory_utilization"
    if not 0 < utilization <= 1:
        raise InvalidConfig(
            name, f"{utilization:g} is not a share of the memory", "Give 0.9, say"
        )  # fmt: skip
    kind, _, rest = text.partition(":")
    if kind != "roofline":
        raise InvalidConfig(
            name,
            f"the cost {text[:64]!r} has no size of a memory",
            "Give --cost roofline:GPU,MODEL, or --num-blocks instead",
        )
    gpu, shape = parse_gpu_and_shape(rest)
    num_blocks = num_blocks_that_fit(gpu, shape, utilization, block_size)
    if num_blocks == 0:
        raise InvalidConfig(
            name,
            f"{utilization * gpu.memory_bytes / 1e9:.1f} GB have no room for a block next to "
            f"{shape.weight_bytes / 1e9:.1f} GB of weights and the memory of steps",
            "Give more, up to 1, or name a smaller model or a larger GPU",
        )
    return num_blocks


def includes_drafts(cost: CostModel) -> bool:
    """Return True where the cost model has times for the plans of a draft model."""
    table = cost.table if isinstance(cost, NoisyCost) else cost
    return isinstance(table, TableCost) and table.tables.draft is not None


@dataclass(frozen=True)
class DraftModelCost:
    """A CostModel that adds a draft model: each of its plans takes a share of the target's time.

    per_mille   that share, in thousandths
    """

    cost: CostModel
    per_mille: int

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the draft plans and of the rows."""
        drafts = sum(self.cost.step_ns(draft) for draft in plan.drafts)
        return self.cost.step_ns(plan) + drafts * self.per_mille // 1000

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the time of a step without drafts."""
        return self.cost.decode_ns(num_rows, total_kv_len, max_kv_len)

    def plan_ns(self, plan: StepPlan) -> int:
        return self.cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        return self.cost.commit_ns(plan)
