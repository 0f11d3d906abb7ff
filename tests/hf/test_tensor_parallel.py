"""A model divided over ranks: logits and tokens are those of one rank.

Ranks are threads, each with an engine of its own that gets the same requests. In float64 no token
may differ. The same over processes and gloo: test_gloo_ranks.py.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.config import EngineConfig, HostTier, Speculation  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.decoders.comparison import probe_logits  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    ModuleDecoder,
    register_attention,
)
from forge.models.hf.host_pool import HostPool, allocate_slabs  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.kv_tiers import HostMemory  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.loading.partition import (  # noqa: E402
    WHOLE,
    Partition,
    ReplicatedModel,
    ShardedModel,
)
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.hf.parallel.sharded_decoder import ShardedDecoder  # noqa: E402
from forge.models.hf.parallel.sharded_sampler import ShardedSampler  # noqa: E402
from forge.models.hf.parallel.sharding import Shard, VocabShard  # noqa: E402
from forge.models.hf.sampling.sampler import Sampler  # noqa: E402
from forge.pause import PauseMode  # noqa: E402
from forge.request import Request, SamplingParams  # noqa: E402
from forge.seam import COUPLED, REJECTION, Bind, Row  # noqa: E402
from forge.weights import NamedWeights  # noqa: E402
from tests.hf import test_speculation as drafting  # noqa: E402
from tests.hf.families import create_module  # noqa: E402
from tests.hf.test_model import EOS, VOCAB, BatchingVariant, prompt_of, run  # noqa: E402
from tests.hf.thread_ranks import (  # noqa: E402
    ThreadCommunicator,
    create_communicators,
    divide_module,
    run_ranks,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
DIVISIBLE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2")
FUSED = ("llama", "qwen2", "qwen3", "mistral", "phi3")
NUM_LAYERS = 3


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


@cache
def module_of(family: str, dtype: Any) -> Any:
    return create_module(family, dtype, ATTENTION_NAME)


@cache
def whole_decoder(family: str, dtype: Any) -> Any:
    return select_decoder(module_of(family, dtype), TorchOps(), 1024)


def divided_decoder(module: Any, communicator: ThreadCommunicator) -> Any:
    """Return this rank's decoder and layers."""
    part = divide_module(module, communicator)
    return select_decoder(part, TorchOps(), 1024, partition=ShardedModel(communicator))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", DIVISIBLE)
def test_logits_are_within_1e_4_of_one_rank_with_two_all_reduces_a_layer(
    family: str, ranks: int
) -> None:
    """With four ranks each of two key heads is on two, and the last rank has 76 ids, not 77."""
    ids, positions = torch.arange(60, dtype=torch.int32) * 7 % VOCAB, range(60)

    @torch.inference_mode()
    def logits_of(communicator: ThreadCommunicator) -> tuple[Any, Any]:
        decoder, layers = divided_decoder(module_of(family, torch.float32), communicator)
        assert isinstance(decoder, ShardedDecoder if family in FUSED else ModuleDecoder)
        communicator.calls.clear()
        fast = probe_logits(decoder, ids, positions, layers, torch.float32)
        assert communicator.calls == {"all_reduce": 2 * NUM_LAYERS}
        plain = ModuleDecoder(divide_module(module_of(family, torch.float32), communicator))
        communicator.calls.clear()
        slow = probe_logits(plain, ids, positions, layers, torch.float32)
        assert communicator.calls == {"all_reduce": 2 * NUM_LAYERS}
        return fast, slow

    decoder, layers = whole_decoder(family, torch.float32)
    with torch.inference_mode():
        expected = probe_logits(decoder, ids, positions, layers, torch.float32)
    for parts in zip(*run_ranks(create_communicators(ranks), logits_of), strict=True):
        assert float((torch.cat(parts, 1) - expected).abs().max()) < 1e-4


def engine_of(
    decoder_and_layers: Any,
    variant: BatchingVariant,
    dtype: Any,
    partition: Partition = WHOLE,
) -> Engine:
    """Return an engine on a decoder, batching in that way."""
    decoder, layers = decoder_and_layers
    config = EngineConfig(
        num_blocks=variant.blocks,
        block_size=16,
        max_num_seqs=variant.rows,
        max_num_batched_tokens=variant.budget,
        max_model_len=1024,
        depth=variant.depth,
    )
    model = assemble_model(
        decoder,
        layers,
        select_kv_cache_spec(layers, dtype, CPU),
        config,
        vocab_size=VOCAB,
        eos_token=EOS,
        device=CPU,
        partition=partition,
    )
    return Engine(model, config)


PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1, "n": 2},
    {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 0},
    {
        **{"temperature": 0.9, "frequency_penalty": 0.5, "top_k": 9},
        **{"logprobs": 0, "logprob_token_ids": [300, 2, 150]},
    },
    {"temperature": 1.0, "logit_bias": {7: 3.0, 300: 2.0}, "min_tokens": 20},
    {"temperature": 1.0, "allowed_token_ids": list(range(140, 170))},
    {"temperature": 0.7, "prompt_logprobs": 2},
    {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": [5, 9, 200], "ignore_eos": False},
)


def some_requests() -> list[Request]:
    """One request for each of PARAMS. Two prompts share their beginning."""
    shared = prompt_of(40)
    prompts = [prompt_of(3 + 11 * index) for index in range(len(PARAMS) - 2)]
    prompts += [[*shared, 11], [*shared, 12, 13]]
    return [
        Request(
            index,
            tuple(prompt),
            SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": index, **params}),
        )
        for index, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]


def outcome_of(engine: Engine, requests: list[Request]) -> Any:
    """Return what each request gained, log probabilities rounded, and the log of plans."""
    outcome = run(engine, *requests)
    gained = [
        (
            delta.request_id,
            delta.choice,
            delta.tokens,
            delta.error,
            [(s.token, round(s.logprob, 6), [t for t, _ in s.top]) for s in delta.logprobs],
            [(s.token, round(s.logprob, 6), [t for t, _ in s.top]) for s in delta.prompt_logprobs],
        )
        for delta in outcome.deltas
    ]
    return gained, outcome.plans


VARIANTS = {
    "together": BatchingVariant(1, 128, 11, 256),
    "small chunks, preempted, planned ahead": BatchingVariant(2, 20, 6, 9, preempts=True),
}


QUICK_CASES = {
    ("llama", 2, "together"),
    ("qwen3", 4, "small chunks, preempted, planned ahead"),
    ("gemma2", 2, "together"),
}
"""Cases that come to everything that the others do."""
LONG_CASES = {
    ("llama", 4, "together"),
    ("gemma2", 2, "small chunks, preempted, planned ahead"),
}


def case_marks(case: tuple[str, int, str]) -> list[pytest.MarkDecorator]:
    """Return the marks of a family, a number of ranks and a way to batch."""
    if case in QUICK_CASES:
        return []
    return [pytest.mark.long if case in LONG_CASES else pytest.mark.soak]


@pytest.mark.parametrize(
    ("family", "ranks", "name"),
    [
        pytest.param(*case, marks=case_marks(case))
        for case in product(("llama", "qwen3", "gemma2"), (2, 4), VARIANTS)
    ],
)
def test_every_request_gains_what_it_gains_on_one_rank(family: str, ranks: int, name: str) -> None:
    """Ragged batches with every sampling parameter: equal tokens, scores and plans on all ranks."""
    variant = VARIANTS[name]
    requests = some_requests()
    expected, plans = outcome_of(
        engine_of(whole_decoder(family, torch.float64), variant, torch.float64), requests
    )
    assert any(plan.preempted for plan in plans) == variant.preempts

    def serve(communicator: ThreadCommunicator) -> Any:
        decoder = divided_decoder(module_of(family, torch.float64), communicator)
        partition = ShardedModel(communicator)
        return outcome_of(engine_of(decoder, variant, torch.float64, partition), requests)

    for gained, rank_plans in run_ranks(create_communicators(ranks), serve):
        assert gained == expected
        assert rank_plans == plans


def test_random_rows_draw_on_two_ranks_what_they_draw_on_one() -> None:
    """Rows without and with filters, over logits of which each rank has a part."""
    rng = torch.Generator().manual_seed(7)
    logits = torch.randn(6, VOCAB, generator=rng, dtype=torch.float64) * 2
    logits[2] = 1.0  # Equal logits: the lower id.
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.2),
    ]
    slots = torch.arange(6, dtype=torch.int32)
    rows = [Row(slot, 0, slot, 10, (3,)) for slot in range(6)]

    def draw(sampler: Sampler, part: Any) -> list[Any]:
        for slot, each in enumerate(params):
            sampler.bind(slot, Bind(each, 100 + slot, 2, (EOS,)))
        sampler.flush_slots()
        tokens, status = torch.zeros(2, 6, dtype=torch.int32)
        drawn = []
        for position in range(11, 31):
            sampler.sample_slots(part, slots, torch.full_like(slots, position), tokens, status)
            drawn.append(tokens.tolist())
            adjusted = [row for row in rows if sampler.is_adjusted(row)]
            if adjusted:
                moved = [row._replace(start=position - 1) for row in adjusted]
                output = sampler.sample(part, moved, [row.slot for row in moved])
                for row, token in zip(moved, output.tokens.tolist(), strict=True):
                    drawn[-1][row.slot] = token
        return drawn

    def serve(communicator: ThreadCommunicator) -> list[Any]:
        vocab = VocabShard.of(Shard(communicator.rank, 2), VOCAB)
        sampler = ShardedSampler(communicator, 6, VOCAB, CPU)
        return draw(sampler, logits[:, vocab.first : vocab.end])

    expected = draw(Sampler(6, VOCAB, CPU), logits)
    assert len({tuple(each) for each in expected}) > 15
    assert any(token >= 154 for each in expected for token in each[:2])
    for drawn in run_ranks(create_communicators(2), serve):
        assert drawn == expected


@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
@pytest.mark.parametrize("kind", ["filters", "sampled", "greedy penalties"])
def test_drafts_are_accepted_as_on_one_rank(kind: str, acceptance: str) -> None:
    """The target is divided over two ranks, its draft is whole on both."""
    sizes = drafting.Sizes(22, 4, 64, 2)
    config = drafting.config_of(sizes, Speculation(num_tokens=3, acceptance=acceptance))

    def engine_for(target: Any, whole: Partition, divided: Partition) -> Engine:
        def model_for(decoder: Any, partition: Partition, draft: Any = None) -> HFModel:
            return assemble_model(
                *decoder,
                select_kv_cache_spec(decoder[1], torch.float64, CPU),
                config,
                vocab_size=61,
                eos_token=drafting.EOS,
                device=CPU,
                draft=draft,
                partition=partition,
            )

        draft = model_for(drafting.create_llama("near"), whole)
        return Engine(model_for(target, divided, draft), config)

    requests = drafting.requests_of(kind)
    plain = drafting.create_llama("same")
    expected = drafting.run(engine_for(plain, WHOLE, WHOLE), requests)
    assert 0 < expected.acceptance_rate < 1

    def serve(communicator: ThreadCommunicator) -> drafting.ServedRun:
        target = divided_decoder(drafting.create_llama_module("same"), communicator)
        partition = ShardedModel(communicator)
        engine = engine_for(target, ReplicatedModel(communicator), partition)
        return drafting.run(engine, requests)

    for served in run_ranks(create_communicators(2), serve):
        assert served.tokens == expected.tokens and not served.errors
        assert served.draft_counts == expected.draft_counts
        for request, scores in expected.scores.items():
            drafting.same_scores(served.scores[request], scores)


NUM_HOST_BLOCKS = 12
TIERED = EngineConfig(
    num_blocks=6,
    block_size=8,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=64,
    depth=2,
    host_tier=HostTier(num_blocks=NUM_HOST_BLOCKS, min_clean_percent=100, min_touches=1),
)
"""Six blocks hold one prompt; twelve in host memory hold four."""


def tiered_model(decoder_and_layers: Any, partition: Partition) -> HFModel:
    """Return a model whose host memory holds each rank's own heads."""
    decoder, layers = decoder_and_layers
    spec = select_kv_cache_spec(layers, torch.float64, CPU)
    block_bytes = spec.bytes_per_token * TIERED.block_size
    slabs = allocate_slabs(NUM_HOST_BLOCKS * block_bytes, is_pinned=False, block_bytes=block_bytes)
    return assemble_model(
        decoder,
        layers,
        spec,
        TIERED,
        vocab_size=VOCAB,
        eos_token=EOS,
        device=CPU,
        host_memory=HostMemory(HostPool(slabs, block_bytes), None),
        partition=partition,
    )


def serve_prefixes_twice(model: HFModel) -> tuple[list[Any], int]:
    """Return the tokens of four prompts, which come twice, and the loads from host memory."""
    prompts = [tuple(range(20 * index + 3, 20 * index + 20)) for index in range(4)]
    engine, found, num_loads = Engine(model, TIERED), [], 0
    for index in range(8):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
        outcome = run(engine, Request(index, prompts[index % 4], params))
        found.append(outcome.tokens(index))
        num_loads += sum(len(plan.loads) for plan in outcome.plans)
    return found, num_loads


def test_prefixes_come_back_from_the_host_memory_of_each_rank() -> None:
    whole = whole_decoder("qwen3", torch.float64)
    expected, num_loads = serve_prefixes_twice(tiered_model(whole, WHOLE))
    assert expected[:4] == expected[4:] and num_loads >= 4

    def serve_rank(communicator: ThreadCommunicator) -> tuple[list[Any], int]:
        decoder = divided_decoder(module_of("qwen3", torch.float64), communicator)
        return serve_prefixes_twice(tiered_model(decoder, ShardedModel(communicator)))

    for served in run_ranks(create_communicators(2), serve_rank):
        assert served == (expected, num_loads)


def test_ranks_refuse_updates_and_sleep_by_name_and_serve_on() -> None:
    """Also an update of a weight that every rank has whole."""
    expected, _ = serve_prefixes_twice(tiered_model(whole_decoder("qwen3", torch.float64), WHOLE))
    norm = NamedWeights({"model.norm.weight": torch.ones(64, dtype=torch.float64)})

    def serve_rank(communicator: ThreadCommunicator) -> list[Any]:
        decoder = divided_decoder(module_of("qwen3", torch.float64), communicator)
        model = tiered_model(decoder, ShardedModel(communicator))
        engine = Engine(model, TIERED)
        engine.pause(PauseMode.KEEP)
        with pytest.raises(InvalidConfig, match=r"^tensor_parallel_size: .* 2 ranks .* one device"):
            engine.update_weights(norm, namespace="new")
        with pytest.raises(InvalidConfig, match=r"^tensor_parallel_size: .* 2 ranks .* one device"):
            engine.sleep(1)
        engine.resume()
        return serve_prefixes_twice(model)[0]

    for served in run_ranks(create_communicators(2), serve_rank):
        assert served == expected


def test_a_row_that_is_not_finite_on_one_rank_fails_on_all() -> None:
    """Id 300, of the last rank alone, has a logit of NaN. Nothing else has a token from it."""
    module = create_module("llama", torch.float64, ATTENTION_NAME)
    module.lm_head.weight.data[300] = float("nan")
    requests = [Request(0, tuple(prompt_of(5)), SamplingParams(max_tokens=4, temperature=0.0))]

    def serve(communicator: ThreadCommunicator) -> Any:
        part = ModuleDecoder(divide_module(module, communicator))
        decoder = (part, part.inspect_layers())
        partition = ShardedModel(communicator)
        return outcome_of(
            engine_of(decoder, VARIANTS["together"], torch.float64, partition), requests
        )[0]

    for gained in run_ranks(create_communicators(2), serve):
        assert [each[3] for each in gained] == ["the model's logits are not finite: NaN"]


def test_families_whose_layers_are_not_known_to_be_divisible_are_refused_by_name() -> None:
    (one, _) = create_communicators(2)
    for family, kind in (("olmo2", "Olmo2ForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
        with pytest.raises(InvalidConfig, match=f"tensor_parallel_size: the layers of {kind}"):
            divide_module(module_of(family, torch.float32), one)
