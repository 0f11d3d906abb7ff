"""Configuration of an engine: geometry, limits, seed, device. Frozen values, validated once.

Owns the numbers and their bounds, and the choices about a device. Knows no model and reads no
environment; a loader completes the geometry (`num_blocks`, `max_model_len`, `end_ids`) before the
engine is built.

    num_blocks x block_size    positions the cache holds
    max_num_seqs               rows of a plan = slots of the device
    max_num_batched_tokens     positions computed by one plan
    depth                      plans in flight: 1 waits for each step, 2 plans ahead of the device
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from forge.errors import InvalidConfig

MAX_GEOMETRY = {
    "num_blocks": 2**24,
    "block_size": 2**12,
    "max_num_seqs": 2**14,
    "max_num_batched_tokens": 2**24,
    "max_model_len": 2**24,
}
"""Upper bounds: far above any device, far below what would fill the host's memory by mistake."""

MAX_SESSIONS = 2**20
MAX_SESSION_TTL_S = 86_400.0
"""A day: a session that pauses longer is computed again."""

MAX_MAX_LOGPROBS = 2**24
"""Bound of the limit, above the size of any vocabulary."""

MAX_STEP_MS = 60_000.0
"""A minute: longer than any step."""

MAX_DRAFTS = 16
"""Most drafts of one sequence in one step."""

ACCEPTANCE_RULES = ("coupled", "rejection")
SPECULATIVE_METHODS = ("draft", "ngram")


def default_batched_tokens(least: int, max_num_seqs: object) -> int:
    """Return a default of `max_num_batched_tokens`: `least`, or two tokens for each row if more.

    With one token for each row, the decodes of a full batch would leave none to prompts and drafts.

    max_num_seqs   as the caller gave it; EngineConfig refuses one that is not an integer
    """
    return max(least, 2 * max_num_seqs) if isinstance(max_num_seqs, int) else least


class StepCosts(NamedTuple):
    """Seconds that steps take, measured once, so that decisions can be repeated.

    Points are (tokens of a step, seconds), ascending; the time is linear between two of them.

    target      steps of one token a sequence, planned ahead
    draft       a step of the draft model; empty: drafts cost nothing
    verify      steps with drafts, by all their tokens; empty: as steps of so many sequences
    scheduler   by sequences: time of the engine around a step with drafts, during which no other
                step is in flight; empty: nothing
    catch_up    by tokens: a step in which the draft model computes known tokens; empty: nothing
    """

    target: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...] = ()
    verify: tuple[tuple[int, float], ...] = ()
    scheduler: tuple[tuple[int, float], ...] = ()
    catch_up: tuple[tuple[int, float], ...] = ()


class MixedStepCosts(NamedTuple):
    """Integer times of steps that compute prompts, measured once: decisions can be repeated.

    tokens        (tokens of a step, microseconds), ascending; linear between two points and in
                  proportion above the last
    position_ns   of each position before a decode row, which the row reads
    pair_ps       of each query-key pair of a chunk and the positions before it
    """

    tokens: tuple[tuple[int, int], ...]
    position_ns: int = 0
    pair_ps: int = 0

    @property
    def is_valid(self) -> bool:
        """True where tokens ascend from 1 or more, and no larger step takes less time."""
        numbers = [self.position_ns, self.pair_ps, *(n for point in self.tokens for n in point)]
        if not self.tokens or any(type(n) is not int or n < 0 for n in numbers):
            return False
        pairs = list(pairwise(((0, 1), *self.tokens)))
        return all(a[0] < b[0] and a[1] <= b[1] for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Choices of speculative decoding: how tokens are proposed, and how they are accepted.

    num_tokens   most drafts of a sequence in a step
    method       draft: a second model proposes; ngram: what followed the same tokens before
    acceptance   coupled: token for token the output without drafts; rejection: more drafts are
                 accepted, and the output is another of the same distribution
    num_blocks   blocks of the draft model's cache; None: as many as the model's
    costs        by which the number of drafts is chosen; None: always num_tokens
    """

    num_tokens: int = 4
    method: str = "draft"
    acceptance: str = "coupled"
    num_blocks: int | None = None
    costs: StepCosts | None = None

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or not 1 <= self.num_tokens <= MAX_DRAFTS:
            raise InvalidConfig(
                "num_speculative_tokens",
                f"{self.num_tokens!r} is not from 1 to {MAX_DRAFTS}",
                "Give 4, say",
            )
        for name, value, allowed in (
            ("speculative_method", self.method, SPECULATIVE_METHODS),
            ("acceptance", self.acceptance, ACCEPTANCE_RULES),
        ):
            if value not in allowed:
                raise InvalidConfig(
                    name, f"{str(value)[:64]!r} is not known", f"Give one of: {', '.join(allowed)}"
                )
        if self.costs is not None and min((s for _, s in self.costs.target), default=0.0) <= 0:
            raise InvalidConfig(
                "speculation",
                f"costs: a step of the model takes {self.costs.target!r} seconds",
                "Give points of more than 0 seconds, or leave costs out",
            )
        num_blocks = self.num_blocks
        if num_blocks is not None and (
            type(num_blocks) is not int or not 1 <= num_blocks <= MAX_GEOMETRY["num_blocks"]
        ):
            raise InvalidConfig(
                "speculation",
                f"num_blocks {num_blocks!r} is not a positive integer",
                "Leave it out",
            )


class LoadCosts(NamedTuple):
    """Times by which an idle engine loads a prefix from the host pool or computes it.

    Integers, so a replay decides the same. They are of an engine that runs nothing else.

    load_ns         nanoseconds of a load, whatever its size
    load_block_ns   of each block loaded
    token_ns        of computing one prompt token, without its attention
    pair_ps         picoseconds of each query-key pair: a token has one with each token up to itself
    """

    load_ns: int
    load_block_ns: int
    token_ns: int
    pair_ps: int = 0

    def transfer_ns(self, num_blocks: int, fetch_block_ns: int = 0) -> int:
        """Return the time of loading blocks from the host pool.

        fetch_block_ns   of reading the file of a block into the host pool first
        """
        return self.load_ns + num_blocks * (self.load_block_ns + fetch_block_ns)

    def prefill_ns(self, start: int, end: int) -> int:
        """Return the time of computing positions [start, end)."""
        num_pairs = (end * (end + 1) - start * (start + 1)) // 2
        return (end - start) * self.token_ns + num_pairs * self.pair_ps // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Choices about files of blocks, which host blocks are written to and read from.

    max_files        most files that are remembered
    max_moves        most files that are written and read at a time; half of them, rounded up, are
                     written at most
    max_wait_plans   plans after which files that are written or read are given up: by
                     then 64 files of 9 MiB come from a disk of 0.25 GB/s, where a plan takes
                     2.5 ms. A plan without rows takes 0.01 s at most
    fetch_block_ns   nanoseconds of reading a file while others are read, where LoadCosts are given
    """

    max_files: int
    max_moves: int = 64
    max_wait_plans: int = 1000
    fetch_block_ns: int = 0

    def __post_init__(self) -> None:
        limits = {
            "max_files": (0, 2**40),
            "max_moves": (1, MAX_GEOMETRY["num_blocks"]),
            "max_wait_plans": (1, 2**40),
            "fetch_block_ns": (0, 2**40),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise InvalidConfig(
                    "disk", f"{name} {value!r} is not an integer from {low} to {high}", "Give one"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Choices about the host pool: blocks in host memory, for what leaves the device.

    num_blocks          blocks of the host pool
    max_moved_blocks    most blocks that a plan stores, and most that it loads while other sequences
                        compute; None: no limit
    min_clean_percent   share of the device's blocks that should be free without a loss; below it
                        blocks are stored
    min_touches         times that a block is computed or used before it is stored
    min_loaded_blocks   shorter runs are computed
    costs               by which an idle engine loads or computes; None: it loads
    disk                files of host blocks; None: there are none
    """

    num_blocks: int
    max_moved_blocks: int | None = 32
    min_clean_percent: int = 12
    min_touches: int = 2
    min_loaded_blocks: int = 1
    costs: LoadCosts | None = None
    disk: DiskTier | None = None

    def __post_init__(self) -> None:
        max_blocks = MAX_GEOMETRY["num_blocks"]
        limits = {
            "num_blocks": (0, max_blocks),
            "max_moved_blocks": (1, max_blocks),
            "min_clean_percent": (0, 100),
            "min_touches": (1, 2),
            "min_loaded_blocks": (1, max_blocks),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if name == "max_moved_blocks" and value is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise InvalidConfig(
                    "host_tier",
                    f"{name} {value!r} is not an integer from {low} to {high}",
                    f"Give {max(low, 1)}, say",
                )
        costs = self.costs
        if costs is not None and any(type(ns) is not int or ns < 0 for ns in costs):
            raise InvalidConfig(
                "host_tier", f"{costs} are not nanoseconds", "Give integers of 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Numbers that stay fixed while an engine runs, except `num_blocks`, which can be resized.

    num_blocks               blocks of the cache
    block_size               tokens per block
    max_num_seqs             most sequences in one step
    max_num_batched_tokens   most tokens computed in one step; at least `max_num_seqs`
    max_model_len            longest sequence, prompt and output, in tokens
    depth                    steps in flight, 1 or 2: 1 waits for each, 2 plans ahead of the device
    max_step_ms              longest step of prompts and running sequences together, predicted from
                             step times that are measured at the start. A step computes at
                             least an eighth of the prompt tokens that the token budget allows
    enable_prefix_caching    computed blocks may be shared by later requests with the same prefix
    seed                     64-bit seed for requests that bring none
    end_ids                  end tokens of the checkpoint besides the model's `eos_token()`
    cache_namespace          model, dtype and layout: hashed into every cached block's key
    speculation              how tokens are proposed ahead of the model; None: they are not
    session_ttl_s            seconds of a pause after which a session expires
    max_sessions             most open sessions of one tenant; beyond it the longest-paused one
                             closes. 0: there are no sessions
    mixed_costs              measured step times for `max_step_ms`; None: steps are not bounded
    host_tier                pool of blocks in host memory; None: there is none
    max_logprobs             most log probabilities with each token; -1: those of the vocabulary
    """

    num_blocks: int = 1024
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    depth: int = 1
    enable_prefix_caching: bool = True
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    cache_namespace: str = ""
    speculation: Speculation | None = None
    session_ttl_s: float = 120.0
    max_sessions: int = 1024
    max_step_ms: float | None = None
    mixed_costs: MixedStepCosts | None = None
    host_tier: HostTier | None = None
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        for name, max_value in MAX_GEOMETRY.items():
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidConfig(name, f"{value!r} is not a positive integer", "Give 1 or more")
            if value > max_value:
                raise InvalidConfig(name, f"{value} is more than {max_value}", "Give less")
        if type(self.depth) is not int or self.depth not in (1, 2):
            raise InvalidConfig("depth", f"{self.depth!r} is not supported", "Give 1 or 2")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise InvalidConfig("seed", f"{self.seed!r} is not a 64-bit integer", "Give an integer")
        if type(self.max_sessions) is not int or not 0 <= self.max_sessions <= MAX_SESSIONS:
            raise InvalidConfig(
                "max_sessions",
                f"{self.max_sessions!r} is not an integer from 0 to {MAX_SESSIONS}",
                "Give 1024, say",
            )
        if type(self.max_logprobs) is not int or not -1 <= self.max_logprobs <= MAX_MAX_LOGPROBS:
            raise InvalidConfig(
                "max_logprobs",
                f"{self.max_logprobs!r} is not an integer from -1 to {MAX_MAX_LOGPROBS}",
                "Give 20, say",
            )
        ttl_s = self.session_ttl_s
        if type(ttl_s) not in (int, float) or not 0 < ttl_s <= MAX_SESSION_TTL_S:
            raise InvalidConfig(
                "session_ttl_s",
                f"{ttl_s!r} is not a number of seconds above 0, at most {MAX_SESSION_TTL_S:g}",
                "Give 120, say",
            )
        max_ms = self.max_step_ms
        if max_ms is not None and (
            type(max_ms) not in (int, float) or not 0.001 <= max_ms <= MAX_STEP_MS
        ):
            raise InvalidConfig(
                "max_step_ms",
                f"{max_ms!r} is not a number of milliseconds from 0.001 to {MAX_STEP_MS:g}",
                "Give 15, say, or leave it out",
            )
        if self.mixed_costs is not None and not self.mixed_costs.is_valid:
            raise InvalidConfig(
                "mixed_costs",
                f"{str(self.mixed_costs)[:200]} has times that are no integers or that fall",
                "Give ascending points of more than 0 tokens and microseconds",
            )
        if type(self.enable_prefix_caching) is not bool:
            raise InvalidConfig(
                "enable_prefix_caching", f"{self.enable_prefix_caching!r} is no boolean", "Give one"
            )
        if self.host_tier is not None and not self.enable_prefix_caching:
            raise InvalidConfig(
                "host_tier",
                "host blocks are found by their prefix, and enable_prefix_caching is False",
                "Enable it, or leave host_tier out",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}, "
                "so a full batch could not decode",
                f"Give at least {self.max_num_seqs} or lower max_num_seqs",
            )


MAX_RANKS = 64
"""Most ranks of a model: more than any machine has GPUs."""

DEVICE_CHOICES = {
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "float32", "float16", "bfloat16", "float64"),
    "load_format": ("auto", "dummy"),
}
"""Allowed values of each named option of DeviceOptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options of loading a checkpoint onto a device. Models without files do not accept them.

    device                   auto, cuda or cpu; auto is cuda where there is a GPU
    dtype                    auto, float32, float16, bfloat16 or float64; auto is the checkpoint's
    gpu_memory_utilization   share of the GPU's memory for weights, steps and cache
    load_format              auto reads the weights, dummy draws random ones
    generation_config        requests that leave out sampling parameters have those of
                             generation_config.json: auto is the checkpoint's, none has no effect;
                             or a folder with another
    enforce_eager            no step is captured as a CUDA graph
    torch_compile            the model's own modules run through torch.compile, and nothing is fused
    tensor_parallel_size     ranks that divide the model, each a process with a GPU of its own
    check_ranks              every rank also schedules, and a plan that is not rank 0's ends the
                             engine
    """

    device: str = "auto"
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
    generation_config: str = "auto"
    enforce_eager: bool = False
    torch_compile: bool = False
    tensor_parallel_size: int = 1
    check_ranks: bool = False

    def __post_init__(self) -> None:
        for name, allowed in DEVICE_CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidConfig(
                    name, f"{str(value)[:64]!r} is not known", f"Give one of: {', '.join(allowed)}"
                )
        if not isinstance(self.generation_config, str):
            raise InvalidConfig(
                "generation_config",
                f"{str(self.generation_config)[:64]!r} is no text",
                "Give auto, none or a folder",
            )
        share = self.gpu_memory_utilization
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise InvalidConfig(
                "gpu_memory_utilization",
                f"{share!r} is not a share of the memory",
                "Give a number above 0 and at most 1",
            )
        for name in ("enforce_eager", "torch_compile", "check_ranks"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise InvalidConfig(name, f"{value!r} is no boolean", "Give one")
        if self.torch_compile and self.enforce_eager:
            raise InvalidConfig(
                "torch_compile",
                "enforce_eager runs each step as it is, uncompiled",
                "Leave one of the two out",
            )
        num_ranks = self.tensor_parallel_size
        if type(num_ranks) is not int or not 1 <= num_ranks <= MAX_RANKS:
            raise InvalidConfig(
                "tensor_parallel_size",
                f"{str(num_ranks)[:64]!r} is not an integer from 1 to {MAX_RANKS}",
                "Give the number of GPUs that divide the model",
            )
        if self.check_ranks and num_ranks == 1:
            raise InvalidConfig(
                "check_ranks",
                "there is one rank, and nothing to compare it with",
                "Give tensor_parallel_size too, or leave it out",
            )
