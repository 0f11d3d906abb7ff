"""Cases: small worlds drawn from a seed, in which blocks, rows and tokens are always short.

Owns how a case is drawn and built. Knows no fault and no check. Every part has draws of its own, so
one more request, or one more draw for it, changes nothing else.

    seed ──► Case ──► request(0), request(1), ...     the same ones, whoever asks and when
               └────► model()                            whose output is known from its contexts
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

Option = TypeVar("Option")

CONFIG, PREFIX, PROMPT, PARAMS, TIMES, FAULTS = range(32, 38)
"""Purposes of draws."""

LONGEST = 20
"""Positions of the longest sequence of every case."""
MOST_PROMPT, MOST_OUTPUT = 12, 7
EOS_TOKEN = 0
SAME_PROMPT = 100
"""Request `who + SAME_PROMPT` has the prompt of request `who`."""
EXCESS = 1000
"""Requests from this number on ask for one token more than a sequence may have."""

COSTS = StepCosts(((1, 1.0), (8, 1.1), (64, 3.0)), ((1, 0.1), (64, 0.3)), host=((1, 0.05),))
"""Of an imagined device on which drafts pay where at least every fourth is right."""


class Dice:
    """Draws one after the other, for one purpose and one request. Same arguments, same draws."""

    def __init__(self, seed: int, purpose: int, who: int = 0) -> None:
        self._key = draw_key(seed, who, purpose)
        self._index = 0

    def share(self) -> float:
        """Uniform on (0, 1)."""
        self._index += 1
        return uniform(self._key, self._index)

    def below(self, count: int) -> int:
        """0 to count - 1."""
        return int(self.share() * count)

    def pick(self, options: Sequence[Option]) -> Option:
        """One of them."""
        return options[self.below(len(options))]

    def maybe(self, share: float, option: Option, otherwise: Option) -> Option:
        """`option` with this probability."""
        return option if self.share() < share else otherwise


class Case(NamedTuple):
    """All that decides a run beside its operations.

    agreement   of the draft, or of the recorded outputs that are proposed
    stranger    the draft's distributions are another model's
    recorded    drafts are recorded outputs, some of them spoiled
    crowded     requests are all as long as they can be, and together need many times the pool
    """

    seed: int
    config: EngineConfig
    vocab_size: int
    policy: str
    num_requests: int
    agreement: float = 1.0
    stranger: bool = False
    recorded: bool = False
    crowded: bool = False

    def request(self, who: int) -> Request:
        """Request number `who`; there are as many as anybody asks for."""
        seed, config = self.seed, self.config
        dice = Dice(seed, PARAMS, who)
        prompt = self._prompt(who % SAME_PROMPT)[: 1 if self.crowded else None]
        room = LONGEST - len(prompt)
        # At the limit, just under it, or anywhere; None: as many as fit.
        asked: int | None = dice.pick((dice.below(MOST_OUTPUT + 1),) * 10 + (room, room - 1))
        if self.crowded:
            asked = room
        if who >= EXCESS:
            asked = room + 1
        elif dice.share() < 0.03:
            asked = None
        params = SamplingParams(
            n=dice.pick((1, 1, 1, 1, 2, 3)),
            temperature=dice.pick((0.0, 0.0, 0.7, 1.0)),
            top_k=dice.maybe(0.2, 3, 0),
            top_p=dice.maybe(0.1, 0.8, 1.0),
            min_p=dice.maybe(0.1, 0.1, 0.0),
            repetition_penalty=dice.maybe(0.15, 1.3, 1.0),
            presence_penalty=dice.maybe(0.1, 0.5, 0.0),
            seed=dice.maybe(0.3, dice.below(2**31), None),
            max_tokens=asked,
            min_tokens=dice.maybe(0.2, min(2, asked or 0), 0),
            stop_token_ids=dice.maybe(0.2, (dice.below(self.vocab_size),), ()),
            ignore_eos=self.crowded or dice.share() < 0.4,
            logprobs=dice.maybe(0.1, 2, None),
            prompt_logprobs=dice.maybe(0.1, 1, None),
        )
        salt = dice.pick(("", "", "", "salt")) if config.enable_prefix_caching else ""
        return Request(who, prompt, params, priority=dice.pick((0, 0, 1)), cache_salt=salt)

    def _prompt(self, who: int) -> tuple[int, ...]:
        """Often a beginning that all share, often as long as a block, a chunk or the longest."""
        config, shared = self.config, Dice(self.seed, PREFIX)
        prefix = [shared.below(self.vocab_size) for _ in range(MOST_PROMPT)]
        dice = Dice(self.seed, PROMPT, who)
        edges = (config.block_size, 2 * config.block_size, config.max_num_batched_tokens)
        length = 1 + dice.below(MOST_PROMPT)
        length = min(MOST_PROMPT, dice.pick((length, length, *edges, edges[0] + 1)))
        same = min(length, dice.below(MOST_PROMPT + 1))
        rest = [dice.below(self.vocab_size) for _ in range(length - same)]
        return (*prefix[:same], *rest)

    def model(
        self, agreement: float = 1.0, stranger: bool = False, draft: LogitsModel | None = None
    ) -> HashModel:
        """The case's model, with a draft if one is given, or one that agrees with it less."""
        return HashModel(
            vocab_size=self.vocab_size,
            eos_token=EOS_TOKEN,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            seed=self.seed + stranger,
            agreement=agreement,
            draft=draft,
        )


def draw_case(seed: int) -> Case:
    """Another seed, other sizes: three to six requests that do not all fit at once."""
    dice = Dice(seed, CONFIG)
    crowded = dice.share() < 0.01
    block_size = 1 if crowded else dice.pick((1, 2, 2, 3, 4))
    rows = 12 if crowded else 1 + dice.below(5)
    config = EngineConfig(
        num_blocks=-(-LONGEST // block_size) + (0 if crowded else dice.pick((0, 0, 0, 1, 8))),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + dice.pick((0, 1, 3, 7, 30)),
        max_model_len=LONGEST,
        depth=dice.pick((1, 2, 2)),
        enable_prefix_caching=dice.share() < 0.7,
        seed=dice.below(2**31),
        speculation=_speculation(dice) if dice.share() < 0.5 else None,
    )
    return Case(
        seed,
        config,
        vocab_size=dice.pick((4, 8, 12)),
        policy=dice.pick(("fcfs", "fcfs", *sorted(POLICIES))),
        num_requests=24 if crowded else 3 + dice.below(4),
        agreement=dice.pick((0.0, 0.5, 0.9, 1.0, 1.0)),
        stranger=dice.share() < 0.2,
        recorded=dice.share() < 0.4,
        crowded=crowded,
    )


def _speculation(dice: Dice) -> Speculation:
    return Speculation(
        num_tokens=dice.pick((1, 2, 3, 5)),
        method=dice.pick(("draft", "draft", "ngram")),
        acceptance=dice.pick(("coupled", "coupled", "rejection")),
        num_blocks=dice.pick((None, None, 3)),
        costs=dice.pick((None, None, COSTS)),
    )
