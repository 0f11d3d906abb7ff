"""Ranks that follow the steps of rank 0 give the tokens of one rank, with every parameter."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.config import Speculation  # noqa: E402
from forge.models.hf.decoders.module_decoder import register_attention  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.loading.partition import (  # noqa: E402
    WHOLE,
    Partition,
    ReplicatedModel,
    ShardedModel,
)
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.parallel.rank_steps import StepSender, follow_steps  # noqa: E402
from forge.models.hf.parallel.sharded_sampler import AgreedSampler  # noqa: E402
from forge.models.hf.runner.batch_step import BatchStep  # noqa: E402
from forge.models.hf.sampling.sampler import SamplerOutput  # noqa: E402
from forge.ranks.message_kind import STEP, message_kind  # noqa: E402
from forge.seam import REJECTION  # noqa: E402
from tests.hf import test_late_rows as structured  # noqa: E402
from tests.hf import test_speculation as drafting  # noqa: E402
from tests.hf import test_tensor_parallel as parallel  # noqa: E402
from tests.hf.test_step_message import joined  # noqa: E402
from tests.hf.thread_ranks import ThreadCommunicator, create_communicators, run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _attention_is_registered() -> None:
    torch.set_num_threads(1)
    register_attention()


class MessageQueue:
    """Both ends of a ring whose ranks are threads."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self.num_messages = 0

    def send(self, buffers: list[Any]) -> None:
        self._messages.put(joined(buffers))
        self.num_messages += 1

    def close(self) -> None:
        self._messages.put(None)

    def receive(self) -> bytes | None:
        return self._messages.get(timeout=60.0)


def run_led(
    create_model: Callable[[ThreadCommunicator], HFModel], run_engine: Callable[[HFModel], Any]
) -> tuple[Any, MessageQueue]:
    """Return what rank 0 returns while rank 1 follows, and the messages between the two."""
    queue = MessageQueue()

    def run(communicator: ThreadCommunicator) -> Any:
        model = create_model(communicator)
        if communicator.rank:
            return follow_steps(model, queue, refuse_lines)  # type: ignore[arg-type]
        model.publish_to(StepSender(queue))  # type: ignore[arg-type]
        try:
            return run_engine(model)
        finally:
            queue.close()

    return run_ranks(create_communicators(2), run)[0], queue


def refuse_lines(line: str) -> None:
    raise AssertionError("no line is recorded")


@pytest.mark.parametrize("name", parallel.VARIANTS)
def test_a_rank_that_follows_gives_rank_0_the_tokens_of_one_rank(name: str) -> None:
    """Ragged batches, chunks, preemption, forks, penalties, masks of ids, scores, prompt scores."""
    variant, requests = parallel.VARIANTS[name], parallel.some_requests()
    dtype = torch.float64
    alone = parallel.engine_of(parallel.whole_decoder("llama", dtype), variant, dtype)
    expected, plans = parallel.outcome_of(alone, requests)

    def create_model(communicator: ThreadCommunicator) -> HFModel:
        decoder = parallel.divided_decoder(parallel.module_of("llama", dtype), communicator)
        engine = parallel.engine_of(decoder, variant, dtype, ShardedModel(communicator))
        assert isinstance(engine.model, HFModel)
        return engine.model

    def run_engine(model: HFModel) -> Any:
        return parallel.outcome_of(parallel.Engine(model, alone.config), requests)

    (gained, led_plans), queue = run_led(create_model, run_engine)
    assert gained == expected
    assert led_plans == plans
    assert queue.num_messages == len(plans)


def test_a_rank_that_follows_moves_its_own_blocks_to_host_memory_and_back() -> None:
    whole = parallel.whole_decoder("qwen3", torch.float64)
    expected, num_loads = parallel.serve_prefixes_twice(parallel.tiered_model(whole, WHOLE))
    assert num_loads >= 4

    def create_model(communicator: ThreadCommunicator) -> HFModel:
        module = parallel.module_of("qwen3", torch.float64)
        decoder = parallel.divided_decoder(module, communicator)
        return parallel.tiered_model(decoder, ShardedModel(communicator))

    served, _ = run_led(create_model, parallel.serve_prefixes_twice)
    assert served == (expected, num_loads)


class OtherDistributions(AgreedSampler):
    """Sampler whose distributions of drafts are wrong on every rank but 0."""

    def sample(self, logits: Any, rows: Any, logits_rows: Any = None) -> SamplerOutput:
        """Sample as rank 0, and reverse the distributions of other ranks."""
        output = super().sample(logits, rows, logits_rows)
        if self._communicator.rank:
            for each in output.draft_distributions:
                each.probs.copy_(each.probs.flip(1))
        return output


class OtherDrafts(ReplicatedModel):
    """Partition of a draft model with OtherDistributions."""

    def create_sampler(self, num_slots: int, vocab_size: int, device: Any) -> OtherDistributions:
        """Return the sampler."""
        return OtherDistributions(self._communicator, num_slots, vocab_size, device)


@pytest.mark.parametrize("draft_partition", [ReplicatedModel, OtherDrafts])
def test_a_rank_that_follows_runs_the_draft_model_too(
    draft_partition: Callable[[Any], Partition],
) -> None:
    """Under rejection rank 0's distributions decide, whatever those of the other rank are."""
    sizes = drafting.Sizes(22, 4, 64, 2)
    config = drafting.config_of(sizes, Speculation(num_tokens=3, acceptance=REJECTION))

    def pair(target: Any, whole: Partition, divided: Partition) -> HFModel:
        def model_for(decoder: Any, partition: Partition, draft: Any = None) -> HFModel:
            return assemble_model(
                *decoder,
                select_kv_cache_spec(decoder[1], torch.float64, parallel.CPU),
                config,
                vocab_size=61,
                eos_token=drafting.EOS,
                device=parallel.CPU,
                draft=draft,
                partition=partition,
            )

        return model_for(target, divided, model_for(drafting.create_llama("near"), whole))

    def run_engine(model: HFModel) -> drafting.ServedRun:
        return drafting.run(parallel.Engine(model, config), drafting.requests_of("filters"))

    expected = run_engine(pair(drafting.create_llama("same"), WHOLE, WHOLE))
    assert 0 < expected.acceptance_rate < 1

    def create_model(communicator: ThreadCommunicator) -> HFModel:
        target = parallel.divided_decoder(drafting.create_llama_module("same"), communicator)
        return pair(target, draft_partition(communicator), ShardedModel(communicator))

    served, queue = run_led(create_model, run_engine)
    assert served.tokens == expected.tokens and not served.errors
    assert served.draft_counts == expected.draft_counts
    assert queue.num_messages > 0


class Snapshots:
    """Rank 0's messages, and its samples as each step finds them."""

    def __init__(self, model: HFModel) -> None:
        self._sampled = model._runner.output_buffer.sampled
        self.messages: list[bytes] = []
        self.samples: list[list[list[int]]] = []

    def send(self, buffers: list[Any]) -> None:
        self.messages.append(joined(buffers))
        if message_kind(self.messages[-1]) == STEP:
            self.samples.append(self._sampled.tolist())


class FollowedSnapshots:
    """Model that follows the messages of rank 0, and its samples as each step finds them."""

    def __init__(self, model: HFModel, messages: list[bytes]) -> None:
        self._model, self._messages = model, iter(messages)
        self._sampled = model._runner.output_buffer.sampled
        self.samples: list[list[list[int]]] = []
        self.follow_late_masks, self.follow_draft = model.follow_late_masks, model.follow_draft

    def receive(self) -> bytes | None:
        return next(self._messages, None)

    def follow(self, step: BatchStep) -> None:
        self.samples.append(self._sampled.tolist())
        self._model.follow(step)


@pytest.mark.parametrize("speculation", [None, Speculation(num_tokens=2, method="ngram")])
def test_a_rank_that_follows_samples_the_same_tokens_from_the_same_logits(
    speculation: Speculation | None,
) -> None:
    """Nothing is divided, so the other rank's samples are its own: masks, late rows, drafts."""
    config = structured.create_config(2, speculation)
    model, _, _ = structured.create_models(config)
    snapshots = Snapshots(model)
    model.publish_to(StepSender(snapshots))  # type: ignore[arg-type]
    proposer = structured.Letters() if speculation is not None else None
    engine = parallel.Engine(model, config, structured.TOKENIZER, proposer=proposer)
    served = drafting.run(engine, structured.create_requests(18))
    assert structured.count_late_rows(served)["decode"] > 2 and not served.errors
    follower = FollowedSnapshots(structured.create_models(config)[0], snapshots.messages)
    follow_steps(follower, follower, refuse_lines)  # type: ignore[arg-type]
    assert follower.samples == snapshots.samples
    assert len(snapshots.messages) > len(snapshots.samples) > 20


def test_a_draft_model_that_fails_on_rank_0_is_not_done_without() -> None:
    """The other ranks may wait for rank 0 in its step."""
    with pytest.raises(ArithmeticError):
        StepSender(MessageQueue()).accept_draft_failure(ArithmeticError("x"))  # type: ignore[arg-type]
