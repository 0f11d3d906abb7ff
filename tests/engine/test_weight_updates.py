"""Pauses and updates of weights: every token is of the weights that were in place for its step.

The model is a HashModel. An update changes its seed, and gives what was written before another
meaning: so keys and values of earlier weights show in the tokens, from any tier.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from forge.async_llm import AsyncLLM
from forge.config import DiskTier, EngineConfig, HostTier, Speculation
from forge.engine import Engine
from forge.engine_loop import EngineLoop
from forge.engine_messages import Pause, PauseResult, Resume, StepReport, UpdateWeights
from forge.errors import DuplicateRequest, EngineDead, EnginePaused, InvalidConfig, InvalidWeights
from forge.llm import LLM
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.pause import PauseMode
from forge.policy import FCFS
from forge.recording import RecordingWriter, build_header, read_entries
from forge.replay_run import ReplayRun
from forge.request import Delta, FinishReason, Request, SamplingParams, Structure, StructureKind
from forge.tokenizer import ByteTokenizer
from forge.weights import NamedWeights, PartTimes, WeightSource
from tests.core.worlds import FaultyStore

VOCAB = 24
NEW_SEED = 77
NEW = NamedWeights({"seed": NEW_SEED})


def create_model(seed: int = 1, **options: Any) -> HashModel:
    sizes = {"vocab_size": VOCAB, "num_blocks": 64, "block_size": 4, "min_eos_len": 99}
    return HashModel(seed=seed, **{**sizes, **options})


def create_config(**options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            **options,
        }
    )


def create_request(id: int, prompt: Sequence[int] = range(9), **params: Any) -> Request:
    return Request(
        id, tuple(prompt), SamplingParams(temperature=0.0, **{"max_tokens": 20} | params)
    )


def continue_greedily(seed: int, context: Sequence[int], num_tokens: int) -> list[int]:
    """Return what a fresh model of this seed generates."""
    model, tokens = create_model(seed), list(context)
    for _ in range(num_tokens):
        logits = model.context_logits(tokens)
        tokens.append(logits.index(max(logits)))
    return tokens[len(context) :]


class Outputs:
    """Tokens and ends of each choice, and the deltas of a run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], Delta] = {}

    def step(self) -> None:
        for delta in self._engine.step():
            key = delta.request_id, delta.choice
            assert key not in self.ends, f"{delta} after its end"
            self.tokens.setdefault(key, []).extend(delta.tokens)
            if delta.finish is not None:
                self.ends[key] = delta

    def run(self) -> None:
        while self._engine.can_step:
            self.step()


CONFIGS = {
    "plain": create_config(),
    "depth 2": create_config(depth=2),
    "no prefix cache": create_config(depth=2, enable_prefix_caching=False),
    "drafts": create_config(depth=2, speculation=Speculation(num_tokens=3)),
    "n-grams": create_config(speculation=Speculation(num_tokens=3, method="ngram")),
    "preemption": create_config(depth=2, num_blocks=14),
    "tiers": create_config(
        depth=2,
        num_blocks=16,
        host_tier=HostTier(
            num_blocks=40, min_touches=1, min_clean_percent=100, disk=DiskTier(max_files=200)
        ),
    ),
}


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_tokens_after_an_update_are_of_a_fresh_model(
    name: str, mode: PauseMode, num_steps: int
) -> None:
    """Requests with forks and equal prefixes are open; others come in the pause and after it."""
    config = CONFIGS[name]
    files = FileMoves(FaultyStore(0)) if config.host_tier else None
    model = create_model(
        num_blocks=config.num_blocks,
        files=files,
        draft=create_model(agreement=0.8) if name == "drafts" else None,
    )
    engine = Engine(model, config)
    outputs = Outputs(engine)
    engine.submit(create_request(100, max_tokens=1))  # its prefix is cached
    outputs.run()
    prompts = {0: range(9), 1: range(12), 2: (7, 8, 9), 3: range(9), 4: range(12)}
    for id in (0, 1, 2):
        engine.submit(create_request(id, prompts[id], n=2 if id == 1 else 1))
    for _ in range(num_steps):
        outputs.step()
    engine.pause(mode)
    assert not engine.plans_in_flight or mode is PauseMode.WAIT
    engine.submit(create_request(3, prompts[3]))
    while not engine.is_paused:
        outputs.step()
    outputs.step()
    stale = {key: len(tokens) for key, tokens in outputs.tokens.items()}
    assert engine.update_weights(NEW, "step 40", namespace="new") == "step 40"
    outputs.run()
    assert {key: len(tokens) for key, tokens in outputs.tokens.items()} == stale
    engine.resume()
    engine.submit(create_request(4, prompts[4], n=2))
    outputs.run()
    assert outputs.ends.keys() == {(100, 0), (0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)}
    for key, tokens in outputs.tokens.items():
        if key[0] == 100:
            continue
        prompt = tuple(prompts[key[0]])
        num_stale = stale.get(key, 0)
        before, after = tokens[:num_stale], tokens[num_stale:]
        assert before == continue_greedily(1, prompt, num_stale), key
        assert after == continue_greedily(NEW_SEED, (*prompt, *before), len(after)), key
        end = outputs.ends[key]
        if end.finish is FinishReason.ABORT:
            assert mode is PauseMode.ABORT and not after
            continue
        assert len(tokens) == 20 and end.finish is FinishReason.LENGTH
        if mode is PauseMode.WAIT and num_stale:
            assert end.weights.version == "0"
        else:
            assert tuple(end.weights) == ("step 40", num_stale)
    assert not engine.has_work and engine.scheduler.pool.num_used_blocks == 0
    if mode is PauseMode.KEEP:
        assert any(stale.values())


def test_no_file_of_earlier_weights_is_read_or_written_again() -> None:
    """The keys of all file moves after an update differ from those before."""
    keys: dict[str, set[bytes]] = {"before": set(), "after": set()}
    now = "before"

    class Spy(HashModel):
        def forward(self, plan: Any) -> Any:
            keys[now] |= {move.key for move in (*plan.spills, *plan.fetches)}
            return super().forward(plan)

    config = CONFIGS["tiers"]
    model = Spy(
        vocab_size=VOCAB,
        num_blocks=16,
        block_size=4,
        min_eos_len=99,
        files=FileMoves(FaultyStore(0)),
    )
    engine = Engine(model, config)
    for now in keys:
        for id in range(4):
            engine.submit(create_request(id, range(id, id + 21), max_tokens=20))
            Outputs(engine).run()
        if now == "before":
            engine.submit(create_request(9, range(2, 23)))  # it is open during the update
            Outputs(engine).step()
            engine.update_weights(NamedWeights({"seed": 0}), namespace="new")
    assert keys["before"] and keys["after"] and not keys["before"] & keys["after"]


def test_a_refused_update_changes_nothing() -> None:
    engine = Engine(create_model(), create_config(depth=2))
    outputs = Outputs(engine)
    engine.submit(create_request(0))
    for _ in range(4):
        outputs.step()
    with pytest.raises(InvalidWeights, match=r"^bias: the model hash has one weight"):
        engine.update_weights(NamedWeights({"seed": 3, "bias": 1}), namespace="new")
    for version, message in (("", "printable ASCII"), ("0", "at the start. Give another")):
        with pytest.raises(InvalidConfig, match=f"^weight_version: .*{message}"):
            engine.update_weights(NEW, version, namespace="new")
    assert engine.pause_state.mode is None and engine.weights.current == "0"
    outputs.run()
    assert outputs.tokens[0, 0] == continue_greedily(1, range(9), 20)


def test_an_update_that_fails_halfway_leaves_the_engine_paused() -> None:
    class Broken(HashModel):
        def update_weights(self, source: WeightSource) -> None:
            super().update_weights(source)
            raise RuntimeError("an illegal memory access")

    engine = Engine(Broken(vocab_size=VOCAB, num_blocks=64, block_size=4), create_config())
    engine.submit(create_request(0))
    engine.step()
    with pytest.raises(EngineDead, match="failed halfway: RuntimeError"):
        engine.update_weights(NEW, namespace="new")
    assert engine.is_paused and not engine.can_step
    with pytest.raises(EnginePaused, match="Update them all"):
        engine.resume()


def test_requests_of_a_pause_can_be_aborted_and_keep_their_ids() -> None:
    engine = Engine(create_model(), create_config())
    engine.pause(PauseMode.KEEP)
    engine.submit(create_request(0, n=2))
    with pytest.raises(DuplicateRequest):
        engine.submit(create_request(0))
    assert (len(engine.pause_state.held_requests), engine.has_work, engine.can_step) == (
        1,
        True,
        False,
    )
    engine.abort(0)
    ends = [(delta.choice, delta.finish) for delta in engine.step()]
    assert ends == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    assert not engine.has_work


def test_a_request_that_no_longer_fits_after_a_pause_ends_with_the_error() -> None:
    engine = Engine(create_model(), create_config())
    engine.pause(PauseMode.KEEP)
    engine.submit(create_request(0, max_tokens=40))
    engine.resize(2)
    engine.resume()
    (end,) = engine.step()
    assert end.finish is FinishReason.ERROR and end.error is not None and "blocks" in end.error


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("end", ["served", "aborted", "refused"])
def test_a_session_with_turns_that_wait_for_the_end_of_a_pause_ends_after_them(
    end: str, is_open: bool
) -> None:
    engine = Engine(create_model(), create_config())
    if is_open:
        engine.submit(replace(create_request(0, max_tokens=1), session_id="a"))
        while engine.has_work:
            engine.step()
    engine.pause(PauseMode.KEEP)
    for number in (1, 2):
        engine.submit(replace(create_request(number, max_tokens=30), session_id="a"))
    assert not engine.end_session(("", "b")) and engine.end_session(("", "a"))
    assert (("", "a") in engine.scheduler.sessions) == is_open
    if end == "aborted":
        engine.abort(2)
    elif end == "refused":
        engine.resize(2)
    engine.resume()
    finishes = []
    while engine.has_work:
        finishes += [delta.finish for delta in engine.step() if delta.finish is not None]
    assert (
        finishes
        == {
            "served": [FinishReason.LENGTH] * 2,
            "aborted": [FinishReason.ABORT, FinishReason.LENGTH],
            "refused": [FinishReason.ERROR] * 2,
        }[end]
    )
    assert not engine.scheduler.sessions


def test_the_end_of_a_session_without_a_name_is_not_that_of_a_request_without_one() -> None:
    engine = Engine(create_model(), create_config())
    engine.pause(PauseMode.KEEP)
    engine.submit(create_request(0, max_tokens=2))
    assert not engine.end_session(("", ""))
    engine.resume()
    deltas = [delta for _ in range(9) if engine.has_work for delta in engine.step()]
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.LENGTH]


def test_a_wait_that_takes_too_long_can_be_made_a_keep() -> None:
    engine = Engine(create_model(), create_config())
    outputs = Outputs(engine)
    engine.submit(create_request(0))
    outputs.step()
    engine.pause(PauseMode.WAIT)
    with pytest.raises(EnginePaused, match="runs 1 requests"):
        engine.update_weights(NEW, namespace="new")
    engine.pause(PauseMode.KEEP)
    assert engine.is_paused
    engine.resume()
    outputs.run()
    assert outputs.tokens[0, 0] == continue_greedily(1, range(9), 20)


def test_a_structured_row_in_flight_gets_its_mask_before_a_pause() -> None:
    """At depth 2 the mask of a row is in the next plan, and a pause plans no row after it."""
    tokenizer = ByteTokenizer()
    model = create_model(vocab_size=tokenizer.vocab_size, eos_token=tokenizer.eos_token)
    engine = Engine(model, create_config(depth=2), tokenizer)
    structure = Structure(StructureKind.REGEX, "[ab]{12}")
    prompt = tuple(tokenizer.encode("say: "))
    engine.submit(create_request(0, prompt, structure=structure, max_tokens=30))
    outputs = Outputs(engine)
    for _ in range(5):
        outputs.step()
    engine.pause(PauseMode.KEEP)
    outputs.step()
    assert not engine.plans_in_flight
    engine.resume()
    outputs.run()
    assert outputs.ends[0, 0].error is None
    text = tokenizer.decode([t for t in outputs.tokens[0, 0] if t != tokenizer.eos_token])
    assert len(text) == 12 and set(text) <= {"a", "b"}


def create_engine(name: str) -> Engine:
    """Return an engine of the config of this name, with a draft or files where it has them."""
    config = CONFIGS[name]
    model = create_model(
        num_blocks=config.num_blocks,
        files=FileMoves(FaultyStore(0)) if config.host_tier else None,
        draft=create_model(agreement=0.8) if name == "drafts" else None,
    )
    return Engine(model, config)


@pytest.mark.parametrize("name", ["depth 2", "drafts", "n-grams", "tiers"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_sleeps_runs_no_step(name: str, level: int) -> None:
    engine = create_engine(name)
    outputs = Outputs(engine)
    engine.submit(create_request(0))
    for _ in range(4):
        outputs.step()
    with pytest.raises(EnginePaused, match="runs 1 requests"):
        engine.sleep(level)
    engine.pause(PauseMode.KEEP)
    assert engine.sleep(level) == (("kv_cache", 0.0),)
    with pytest.raises(EnginePaused, match="Wake it first"):
        engine.resume()
    with pytest.raises(EnginePaused, match="Wake it first"):
        engine.update_weights(NEW, namespace="new")
    outputs.run()
    engine.wake()
    seed = 1
    if level == 2:
        with pytest.raises(EnginePaused, match="Update them all"):
            engine.resume()
        engine.update_weights(NEW, namespace="new")
        seed = NEW_SEED
    num_before = len(outputs.tokens[0, 0])
    assert 0 < num_before < 20
    engine.resume()
    outputs.run()
    before = outputs.tokens[0, 0][:num_before]
    assert outputs.tokens[0, 0][num_before:] == continue_greedily(
        seed, (*range(9), *before), 20 - num_before
    )


def test_a_sleep_that_the_model_refuses_changes_nothing() -> None:
    class Divided(HashModel):
        def sleep(self, level: int) -> PartTimes:
            raise InvalidConfig("tensor_parallel_size", "it has 2 ranks", "Serve it on one device")

    engine = Engine(
        Divided(vocab_size=VOCAB, num_blocks=64, block_size=4, seed=1, min_eos_len=99),
        create_config(),
    )
    outputs = Outputs(engine)
    engine.submit(create_request(0))
    outputs.run()
    num_cached = engine.scheduler.pool.num_cached_blocks
    engine.pause(PauseMode.KEEP)
    with pytest.raises(InvalidConfig, match="Serve it on one device"):
        engine.sleep(1)
    assert engine.scheduler.pool.num_cached_blocks == num_cached > 0
    with pytest.raises(EnginePaused, match="the model is awake"):
        engine.wake()
    engine.resume()
    engine.submit(create_request(1))
    outputs.run()
    assert outputs.tokens[1, 0] == outputs.tokens[0, 0] == continue_greedily(1, range(9), 20)


@pytest.mark.parametrize("command", ["sleep", "wake"])
def test_a_sleep_or_wake_that_fails_halfway_leaves_the_engine_paused(command: str) -> None:
    def fail(*_: int) -> PartTimes:
        raise RuntimeError("an illegal memory access")

    model = type("Broken", (HashModel,), {command: fail})
    engine = Engine(model(vocab_size=VOCAB, num_blocks=64, block_size=4), create_config())
    engine.pause(PauseMode.KEEP)
    with pytest.raises(EngineDead, match=f"a {command} failed halfway: RuntimeError"):
        engine.sleep(1)
        engine.wake()
    with pytest.raises(EnginePaused):
        engine.resume()


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("name", ["depth 2", "drafts", "tiers"])
def test_a_replay_repeats_pauses_updates_and_sleep(name: str, mode: PauseMode) -> None:
    config = CONFIGS[name]
    model = create_model(
        num_blocks=config.num_blocks,
        files=FileMoves(FaultyStore(0)) if config.host_tier else None,
        draft=create_model(agreement=0.8) if name == "drafts" else None,
    )
    lines: list[str] = []
    header = build_header(config, VOCAB, 0, "fcfs", "1")
    engine = Engine(model, config, recorder=RecordingWriter(lines.append, lambda: 0, header))
    outputs = Outputs(engine)
    for id in range(3):
        engine.submit(create_request(id, range(id, 11)))
        outputs.step()
    engine.pause(mode)
    while not engine.is_paused:
        outputs.step()
    engine.submit(create_request(5))
    engine.update_weights(NEW, namespace="new")
    engine.sleep(1)
    engine.wake()
    engine.resume()
    outputs.step()
    engine.update_weights(NamedWeights({"seed": 5}), namespace="newer")
    outputs.run()
    entries = [entry for _, entry in read_entries(lines)]
    replay = ReplayRun(json.loads(json.dumps(entries[0])), FCFS)
    assert [replay.apply(entry) for entry in entries[1:]] == [None] * (len(entries) - 1)
    assert replay.steps == engine.scheduler.next_step > 10 and not replay.scheduler.has_work
    assert {"pause", "resume", "weights", "sleep"} <= {key for entry in entries for key in entry}


def test_a_pause_that_is_ended_before_it_began_is_refused() -> None:
    reports: list[StepReport] = []
    engine = Engine(create_model(), create_config())

    def on_report(report: StepReport) -> None:
        reports.append(report)
        if not report.status.has_work:
            loop.stop()

    loop = EngineLoop(engine, on_report)
    for command in (create_request(0), Pause(1, PauseMode.WAIT), Resume(2)):
        loop.post(command)
    loop.run()
    ended, resumed = reports[0].pause_results
    assert (ended.ticket, resumed) == (1, PauseResult(2)) and isinstance(
        ended.refusal, EnginePaused
    )
    assert sum(len(delta.tokens) for report in reports for delta in report.deltas) == 20


def test_each_update_of_a_report_has_its_own_version() -> None:
    """The report's status has that of the last one."""
    reports: list[StepReport] = []

    def on_report(report: StepReport) -> None:
        reports.append(report)
        loop.stop()

    loop = EngineLoop(Engine(create_model(), create_config()), on_report)
    for ticket, version in ((1, "one"), (2, None), (3, "0")):
        loop.post(UpdateWeights(ticket, NEW, version, f"namespace {ticket}"))
    loop.run()
    results = [(each.ticket, each.weight_version) for each in reports[0].pause_results]
    assert results == [(1, "one"), (2, "2"), (3, None)]
    assert reports[0].status.weight_version == "2"


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_turns_of_a_session_go_on_after_an_update(sleeps: bool) -> None:
    engine = Engine(create_model(), create_config())
    outputs = Outputs(engine)
    first = create_request(0, max_tokens=8)
    engine.submit(replace(first, session_id="s"))
    outputs.run()
    assert engine.scheduler.sessions["", "s"].chain
    if sleeps:
        engine.pause(PauseMode.KEEP)
        engine.sleep(2)
        engine.wake()
    engine.update_weights(NEW, namespace="new")
    engine.resume()
    assert not engine.scheduler.sessions["", "s"].chain
    prompt = (*range(9), *outputs.tokens[0, 0], 3)
    engine.submit(replace(create_request(1, prompt), session_id="s"))
    outputs.run()
    assert outputs.tokens[1, 0] == continue_greedily(NEW_SEED, prompt, 20)
    assert engine.scheduler.sessions["", "s"].num_turns == 2
    assert engine.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_tensors_are_taken_from_the_process_of_the_engine_only(kind: Any) -> None:
    async def update() -> None:
        async with kind("hash:seed=1") as llm:
            if kind is AsyncLLM:
                update = await llm.update_weights(NEW, "new")
                assert update.version == "new" and update.seconds.keys() == {"update"}
                assert llm.weight_version == "new"
            else:
                with pytest.raises(InvalidWeights, match="Give WeightFiles"):
                    await llm.update_weights(NEW)

    asyncio.run(asyncio.wait_for(update(), 20))


@pytest.mark.parametrize(
    ("mode", "end", "stale"),
    [("abort", "abort", 0), ("wait", "length", 0), ("keep", "length", 3)],
)
def test_streams_of_an_llm_end_as_the_pause_says(mode: str, end: str, stale: int) -> None:
    """The one with a token at the pause, and the one that no step has served."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM("hash:seed=1") as llm:
        streams = [llm.stream("Once", params) for _ in range(2)]
        first = [delta.token_ids for delta in islice(streams[0], 3)]
        llm.pause(mode)
        with pytest.raises(EnginePaused, match="Call resume first"):
            llm.generate("Once", params)
        llm.update_weights({"seed": 2}, "two")
        llm.resume()
        deltas = [list(stream) for stream in streams]
        assert [rest[-1].finish_reason for rest in deltas] == [end, end]
        num_tokens = len(first) + sum(len(delta.token_ids) for delta in deltas[0])
        assert num_tokens == (3 if mode == "abort" else 20)
        assert deltas[0][-1].weights.num_stale_tokens == stale
        (output,) = llm.generate("Once", params)
        assert output.weight_version == "two"
    with pytest.raises(InvalidConfig, match="Give one of: abort, wait, keep"):
        llm.pause("never")


def test_an_update_delivers_kv_events_at_once() -> None:
    batches: list[object] = []
    engine = Engine(create_model(), create_config(), kv_events=batches.append)
    engine.submit(create_request(0))
    while engine.can_step:
        engine.step()
    engine.pause(PauseMode.KEEP)
    batches.clear()
    engine.update_weights(NEW, namespace="new")
    assert batches


def test_a_held_request_keeps_its_structure_compiled() -> None:
    """Nothing else refers to it, and `resume` would compile it on the engine's thread."""
    with LLM("hash", num_blocks=64) as llm:
        engine, structure = llm.engine, Structure.regex("[0-9]{3}")
        engine.pause(PauseMode.KEEP)
        backend = engine.grammar_backend
        backend.compile(structure)
        engine.submit(Request(0, (1, 2), SamplingParams(max_tokens=4, structure=structure)))
        backend._recent.clear()
        gc.collect()
        assert backend.compiled_grammar(structure) is not None
        engine.resume()
        engine.abort(0)
        while engine.has_work:
            engine.step()
        backend._recent.clear()
        gc.collect()
        assert backend.compiled_grammar(structure) is None


def test_a_number_that_a_trainer_gave_is_no_later_version() -> None:
    with LLM("hash", num_blocks=8) as llm:
        versions = [llm.update_weights({"seed": 1}, name) for name in ("2", None, "9", None, "a")]
        assert [*versions, llm.update_weights({"seed": 2})] == ["2", "3", "9", "10", "a", "11"]


def test_a_wait_of_an_engine_that_is_paused_changes_nothing() -> None:
    engine = Engine(create_model(), create_config())
    engine.submit(create_request(0))
    engine.step()
    engine.pause(PauseMode.KEEP)
    engine.pause(PauseMode.WAIT)
    assert engine.is_paused and engine.pause_state.mode is PauseMode.KEEP
    assert not engine.can_step
