"""Random cases: small worlds drawn from a seed, in which blocks, rows and tokens are always short.

Owns how a case is drawn and built. Knows no fault and no check. Every part has separate draws, so
one more request, or one more draw for it, changes nothing else.

    seed ──► RandomCase ──► request(0), request(1), ...   equal at every call
                  └───────► create_model()                its output follows from its contexts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from forge.config import EngineConfig, Speculation, StepCosts
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.policy import POLICIES
from forge.request import Request, SamplingParams
from forge.sampling import draw_key, uniform

Item = TypeVar("Item")

CONFIG_DRAW, PREFIX_DRAW, PROMPT_DRAW, PARAMS_DRAW, TIMES_DRAW, FAULTS_DRAW = range(32, 38)
"""Purposes of draws."""

MAX_LEN = 20
"""Positions of the longest sequence of every case."""
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 12, 7
EOS_TOKEN = 0
SAME_PROMPT_OFFSET = 100
"""Request `request_id + SAME_PROMPT_OFFSET` has the prompt of request `request_id`."""
FIRST_TOO_LONG_ID = 1000
"""Requests from this number on need one token more than a sequence may have."""

DRAFT_STEP_COSTS = StepCosts(
    ((1, 1.0), (8, 1.1), (64, 3.0)), ((1, 0.1), (64, 0.3)), scheduler=((1, 0.05),)
)
"""Costs of an imagined device on which drafts pay if at least one in four is right."""


class SeededDraws:
    """Consecutive draws for one purpose and one request. Same arguments, same draws."""

    def __init__(self, seed: int, purpose: int, request_id: int = 0) -> None:
        self._key = draw_key(seed, request_id, purpose)
        self._index = 0

    def uniform(self) -> float:
        """Draw a number from (0, 1), uniformly."""
        self._index += 1
        return uniform(self._key, self._index)

    def randrange(self, count: int) -> int:
        """Draw an integer from 0 to count - 1."""
        return int(self.uniform() * count)

    def choice(self, options: Sequence[Item]) -> Item:
        """Draw one of the options."""
        return options[self.randrange(len(options))]

    def choice_with_probability(self, probability: float, option: Item, default: Item) -> Item:
        """Draw `option` with this probability, otherwise `default`."""
        return option if self.uniform() < probability else default


class RandomCase(NamedTuple):
    """All that decides a run except its operations.

    agreement             of the draft model, or of the recorded outputs that are proposed
    has_unrelated_draft   the draft's distributions are another model's
    has_recorded_drafts   drafts are recorded outputs, some of them replaced
    is_crowded            requests have the largest length, and together need many times the pool
    """

    seed: int
    config: EngineConfig
    vocab_size: int
    policy: str
    num_requests: int
    agreement: float = 1.0
    has_unrelated_draft: bool = False
    has_recorded_drafts: bool = False
    is_crowded: bool = False

    def request(self, request_id: int) -> Request:
        """Return request number `request_id`. Every number is valid."""
        seed, config = self.seed, self.config
        dice = SeededDraws(seed, PARAMS_DRAW, request_id)
        prompt = self._prompt(request_id % SAME_PROMPT_OFFSET)[: 1 if self.is_crowded else None]
        max_output = MAX_LEN - len(prompt)
        # At the limit, just under it, or anywhere; None: as many as fit.
        max_tokens: int | None = dice.choice(
            (dice.randrange(MAX_OUTPUT_TOKENS + 1),) * 10 + (max_output, max_output - 1)
        )
        if self.is_crowded:
            max_tokens = max_output
        if request_id >= FIRST_TOO_LONG_ID:
            max_tokens = max_output + 1
        elif dice.uniform() < 0.03:
            max_tokens = None
        params = SamplingParams(
            n=dice.choice((1, 1, 1, 1, 2, 3)),
            temperature=dice.choice((0.0, 0.0, 0.7, 1.0)),
            top_k=dice.choice_with_probability(0.2, 3, 0),
            top_p=dice.choice_with_probability(0.1, 0.8, 1.0),
            min_p=dice.choice_with_probability(0.1, 0.1, 0.0),
            repetition_penalty=dice.choice_with_probability(0.15, 1.3, 1.0),
            presence_penalty=dice.choice_with_probability(0.1, 0.5, 0.0),
            seed=dice.choice_with_probability(0.3, dice.randrange(2**31), None),
            max_tokens=max_tokens,
            min_tokens=dice.choice_with_probability(0.2, min(2, max_tokens or 0), 0),
            stop_token_ids=dice.choice_with_probability(
                0.2, (dice.randrange(self.vocab_size),), ()
            ),
            ignore_eos=self.is_crowded or dice.uniform() < 0.4,
            logprobs=dice.choice_with_probability(0.1, 2, None),
            prompt_logprobs=dice.choice_with_probability(0.1, 1, None),
        )
        salt = dice.choice(("", "", "", "salt")) if config.enable_prefix_caching else ""
        return Request(request_id, prompt, params, priority=dice.choice((0, 0, 1)), cache_salt=salt)

    def _prompt(self, request_id: int) -> tuple[int, ...]:
        """Draw a prompt, often with the shared prefix, a length at a limit, or both."""
        config, shared = self.config, SeededDraws(self.seed, PREFIX_DRAW)
        prefix = [shared.randrange(self.vocab_size) for _ in range(MAX_PROMPT_TOKENS)]
        dice = SeededDraws(self.seed, PROMPT_DRAW, request_id)
        boundaries = (config.block_size, 2 * config.block_size, config.max_num_batched_tokens)
        length = 1 + dice.randrange(MAX_PROMPT_TOKENS)
        length = min(
            MAX_PROMPT_TOKENS, dice.choice((length, length, *boundaries, boundaries[0] + 1))
        )
        num_shared = min(length, dice.randrange(MAX_PROMPT_TOKENS + 1))
        suffix = [dice.randrange(self.vocab_size) for _ in range(length - num_shared)]
        return (*prefix[:num_shared], *suffix)

    def create_model(
        self, agreement: float = 1.0, is_unrelated: bool = False, draft: LogitsModel | None = None
    ) -> HashModel:
        """Create the case's model, with a draft model if given, or one that agrees with it less."""
        return HashModel(
            vocab_size=self.vocab_size,
            eos_token=EOS_TOKEN,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            seed=self.seed + is_unrelated,
            agreement=agreement,
            draft=draft,
        )


def draw_case(seed: int) -> RandomCase:
    """Draw a case with other sizes per seed: three to six requests that do not all fit at once."""
    dice = SeededDraws(seed, CONFIG_DRAW)
    crowded = dice.uniform() < 0.01
    block_size = 1 if crowded else dice.choice((1, 2, 2, 3, 4))
    rows = 12 if crowded else 1 + dice.randrange(5)
    config = EngineConfig(
        num_blocks=-(-MAX_LEN // block_size) + (0 if crowded else dice.choice((0, 0, 0, 1, 8))),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + dice.choice((0, 1, 3, 7, 30)),
        max_model_len=MAX_LEN,
        depth=dice.choice((1, 2, 2)),
        enable_prefix_caching=dice.uniform() < 0.7,
        seed=dice.randrange(2**31),
        speculation=_draw_speculation(dice) if dice.uniform() < 0.5 else None,
    )
    return RandomCase(
        seed,
        config,
        vocab_size=dice.choice((4, 8, 12)),
        policy=dice.choice(("fcfs", "fcfs", *sorted(POLICIES))),
        num_requests=24 if crowded else 3 + dice.randrange(4),
        agreement=dice.choice((0.0, 0.5, 0.9, 1.0, 1.0)),
        has_unrelated_draft=dice.uniform() < 0.2,
        has_recorded_drafts=dice.uniform() < 0.4,
        is_crowded=crowded,
    )


def _draw_speculation(dice: SeededDraws) -> Speculation:
    return Speculation(
        num_tokens=dice.choice((1, 2, 3, 5)),
        method=dice.choice(("draft", "draft", "ngram")),
        acceptance=dice.choice(("coupled", "coupled", "rejection")),
        num_blocks=dice.choice((None, None, 3)),
        costs=dice.choice((None, None, DRAFT_STEP_COSTS)),
    )
