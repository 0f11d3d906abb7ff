"""LLM: text in, text out, on one engine driven by the caller's thread."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from forge.async_llm import AsyncLLM
from forge.cli.options import MODEL_OPTION
from forge.config import EngineConfig
from forge.deferred_interrupt import defer_interrupt
from forge.engine import Engine
from forge.engine_options import add_offline_defaults
from forge.errors import EngineDead, ForgeError, InvalidConfig, InvalidRequest, PolicyError
from forge.llm import LLM, Prompt
from forge.models import loader
from forge.models.hash import HashModel
from forge.outputs import OutputProcessor, RequestOutput, TextDelta, merge_deltas
from forge.policy import FCFS, POLICIES, Candidate, PolicyContext, least_progress
from forge.policy_loader import load_policy
from forge.recorder import Recorder
from forge.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Structure,
    TokenLogprob,
)
from forge.seam import StepOutput, StepPlan
from forge.tokenizer import ByteTokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def single_output(outputs: list[RequestOutput]) -> RequestOutput:
    (output,) = outputs
    return output


def is_idle(llm: LLM) -> bool:
    """Return whether nothing runs, waits or holds a block."""
    return not llm.engine.has_work and not llm.engine.scheduler.pool.tables


# Inputs.


@pytest.mark.parametrize(
    "prompt", ["abc", ["abc"], ids("abc"), [ids("abc")], (ids("abc"),), tuple(ids("abc"))]
)
def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any) -> None:
    output = single_output(LLM("hash").generate(prompt, GREEDY))
    assert output.prompt_token_ids == ids("abc")
    assert len(output.token_ids) == 12
    assert output.text == ByteTokenizer().decode(output.token_ids)
    assert output.finish_reason == "length"


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    prompts: list[Prompt] = ["a", ids("bc"), "déf"]
    outputs = LLM("hash").generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids("a"), ids("bc"), ids("déf")]


def test_no_prompts_give_no_outputs() -> None:
    assert LLM("hash").generate([]) == []


def test_prompts_share_steps() -> None:
    llm = LLM("hash")
    llm.generate(["a", "b", "c", "d"], GREEDY)
    assert llm.engine.num_steps == 12


def test_each_prompt_may_have_params_of_its_own() -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = LLM("hash").generate(["a", "b", "c"], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3]


def test_another_model_seed_is_another_model() -> None:
    texts = [
        single_output(LLM(name).generate("a", GREEDY)).text for name in ("hash", "hash:seed=1")
    ]
    assert texts[0] != texts[1]


# Outputs.


def test_more_choices_continue_one_prompt_and_the_first_is_as_if_alone() -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=16, ignore_eos=True)
    llm = LLM("hash")
    output = single_output(llm.generate("abc", params))
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    assert len({choice.text for choice in output.choices}) == 3
    alone = single_output(
        llm.generate("abc", SamplingParams(seed=4, max_tokens=16, ignore_eos=True))
    )
    assert output.choices[0] == alone.choices[0]
    assert (output.text, output.token_ids) == (alone.text, alone.token_ids)


def test_a_stop_string_ends_the_text_before_it_and_keeps_the_tokens_it_is_made_of() -> None:
    """A token is a byte here, so four characters span four tokens."""
    llm = LLM("hash")
    whole = single_output(llm.generate("abc", GREEDY))
    stop = whole.text[5:9]
    assert whole.text.index(stop) == 5
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=["no such", stop])
    stopped = single_output(llm.generate("abc", params))
    assert stopped.text == whole.text[:5]
    assert stopped.token_ids == whole.token_ids[:9]
    assert stopped.finish_reason == "stop"


def test_a_stream_never_shows_a_part_of_a_stop_string() -> None:
    llm = LLM("hash")
    whole = single_output(llm.generate("abc", GREEDY)).text
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=whole[5:9])
    deltas = list(llm.stream("abc", params))
    assert "".join(delta.text for delta in deltas) == whole[:5]
    assert len(deltas) == 9


def test_text_held_back_for_a_stop_that_never_came_is_given_at_the_end() -> None:
    llm = LLM("hash")
    whole = single_output(llm.generate("abc", GREEDY)).text
    held = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop=whole[-3:] + "never"
    )
    output = single_output(llm.generate("abc", held))
    assert (output.text, output.finish_reason) == (whole, "length")
    assert [delta.text for delta in llm.stream("abc", held)][-3:] == ["", "", whole[-3:]]


def test_a_stop_token_is_kept_and_its_text_is_not() -> None:
    llm = LLM("hash")
    whole = single_output(llm.generate("abc", GREEDY))
    stop = whole.token_ids[4]
    end = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    stopped = single_output(llm.generate("abc", params))
    assert stopped.token_ids == whole.token_ids[: end + 1]
    assert stopped.text == whole.text[:end]
    assert stopped.finish_reason == "stop"


def test_the_end_token_ends_the_output_and_has_no_text() -> None:
    params = SamplingParams(logit_bias={0: 100.0}, max_tokens=8)
    output = single_output(LLM("hash").generate("abcd", params))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [0], "stop")


def test_each_token_has_its_log_probability_and_the_most_likely_ones() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    output = single_output(LLM("hash").generate("abc", params))
    assert [entry.token for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert len(entry.top) == 3
        assert 0.0 < sum(math.exp(logprob) for _, logprob in entry.top) <= 1.0 + 1e-9
    assert not output.prompt_logprobs


def test_the_tokens_of_a_prompt_after_the_first_have_log_probabilities_too() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    output = single_output(LLM("hash").generate("abcde", params))
    assert [entry.token for entry in output.prompt_logprobs] == ids("bcde")
    assert all(entry.logprob < 0.0 and len(entry.top) == 2 for entry in output.prompt_logprobs)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")


def test_log_probabilities_of_a_prompt_are_those_of_generating_it() -> None:
    llm = LLM("hash")
    output = single_output(
        llm.generate(
            "abc", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
        )
    )
    scored = single_output(
        llm.generate(
            output.prompt_token_ids + output.token_ids,
            SamplingParams(max_tokens=0, prompt_logprobs=0),
        )
    )
    assert scored.prompt_logprobs[-4:] == output.logprobs


# Seeds.


def test_a_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    params = SamplingParams(seed=11, max_tokens=20)
    alone = single_output(LLM("hash").generate("abc", params))
    crowd = LLM("hash").generate(["x", "abc", "yy", "abd"], [GREEDY, params, GREEDY, GREEDY])
    assert crowd[1] == alone


def test_without_a_seed_the_engine_s_seed_and_the_order_of_requests_decide() -> None:
    def texts(seed: int) -> list[str]:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        return [output.text for output in LLM("hash", seed=seed).generate(["a", "a"], params)]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(2)}) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_seed_gives_the_same_text_after_preemption(depth: int) -> None:
    """Four requests grow to four blocks each in a pool of six."""
    preempted: list[int] = []

    def noted(running: Sequence[Candidate], context: PolicyContext) -> Candidate:
        victim = least_progress(running, context)
        preempted.append(victim.id)
        return victim

    prompts = ["abcd", "efgh", "ijkl", "mnop"]
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(4)]
    tight = LLM(
        "hash",
        policy=FCFS._replace(preempt=noted),
        num_blocks=6,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        depth=depth,
    )
    outputs = tight.generate(prompts, params)
    assert preempted
    alone = [
        single_output(LLM("hash").generate(p, q)) for p, q in zip(prompts, params, strict=True)
    ]
    assert [each.choices for each in outputs] == [each.choices for each in alone]


# Streams.


def test_a_stream_yields_what_generate_returns_a_token_at_a_time() -> None:
    llm = LLM("hash")
    params = SamplingParams(seed=3, max_tokens=40)
    whole = single_output(llm.generate("abc", params))
    deltas = list(llm.stream("abc", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert {len(delta.token_ids) for delta in deltas} == {1}
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason


def test_a_stream_of_several_choices_ends_when_all_have_ended() -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)
    deltas = list(LLM("hash").stream("abc", params))
    assert {d.choice: d.finish_reason for d in deltas if d.finish_reason} == {
        0: "length",
        1: "length",
    }


def test_a_stream_joins_to_the_text_when_characters_are_several_tokens() -> None:
    """Only the two bytes of é are allowed: the text has whole, broken and unfinished characters."""
    llm = LLM("hash")
    params = SamplingParams(seed=0, max_tokens=41, allowed_token_ids=[0xC4, 0xAA])
    whole = single_output(llm.generate("abc", params))
    assert whole.text == ByteTokenizer().decode(whole.token_ids)
    assert "é" in whole.text and "\ufffd" in whole.text
    deltas = list(llm.stream("abc", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert "" in [delta.text for delta in deltas]


def test_a_character_comes_whole_with_its_last_token() -> None:
    wanted = ids("a😀b")
    pinned = {tuple(ids("?") + wanted[:i]): token for i, token in enumerate(wanted)}
    engine = Engine(HashModel(forced_tokens=pinned), EngineConfig(), ByteTokenizer())
    request = Request(0, tuple(ids("?")), SamplingParams(max_tokens=6))
    transcript = OutputProcessor(request, ByteTokenizer())
    engine.submit(request)
    texts = [transcript.process(delta).text for _ in range(6) for delta in engine.step()]
    assert texts == ["a", "", "", "", "😀", "b"]
    assert transcript.is_finished


def test_two_streams_advance_side_by_side() -> None:
    """Reading one advances the other: neither waits for the other's end."""
    llm = LLM("hash")
    first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert len(pairs) == 12
    assert llm.engine.num_steps == 12
    for deltas, prompt in zip(zip(*pairs, strict=True), ("abc", "xyz"), strict=True):
        alone = single_output(LLM("hash").generate(prompt, GREEDY))
        assert "".join(delta.text for delta in deltas) == alone.text


def test_generate_may_be_called_while_a_stream_is_open() -> None:
    llm = LLM("hash")
    stream = llm.stream("abc", GREEDY)
    first_text = next(stream).text
    assert single_output(llm.generate("xyz", GREEDY)) == single_output(
        LLM("hash").generate("xyz", GREEDY)
    )
    rest = "".join(delta.text for delta in stream)
    assert first_text + rest == single_output(LLM("hash").generate("abc", GREEDY)).text
    assert is_idle(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dropped_iterator_frees_its_blocks(depth: int) -> None:
    llm = LLM("hash", depth=depth)
    stream = llm.stream("a long prompt " * 10, SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.pool.num_used_blocks > 0
    del stream
    assert llm.engine.scheduler.pool.num_used_blocks == 0
    assert single_output(llm.generate("abc", GREEDY)) == single_output(
        LLM("hash").generate("abc", GREEDY)
    )
    assert is_idle(llm)


@pytest.mark.long
def test_every_block_is_free_after_generate() -> None:
    llm = LLM("hash", num_blocks=16)
    llm.generate(["abc"] * 20, SamplingParams(max_tokens=50))
    assert is_idle(llm)
    assert llm.engine.scheduler.pool.num_free_blocks == 16


# Output processors.


def test_merged_deltas_have_the_content_of_the_single_ones() -> None:
    first, second = TokenLogprob(5, -1.0), TokenLogprob(6, -2.0)
    waited = [
        TextDelta(0, "a", (1,), logprobs=(first,), prompt_logprobs=(second,)),
        TextDelta(1, "x", (2,)),
        TextDelta(0, "b", (3, 4), "error", (second,), (), "why"),
    ]
    assert merge_deltas(waited) == [
        TextDelta(0, "ab", (1, 3, 4), "error", (first, second), (second,), "why"),
        TextDelta(1, "x", (2,)),
    ]


def test_an_ending_flushes_the_text_held_back_for_a_stop() -> None:
    request = Request(0, (1,), SamplingParams(n=2, stop="xyz"))
    transcript = OutputProcessor(request, ByteTokenizer())
    assert transcript.process(Delta(0, 1, tuple(ids("axy")))).text == "a"
    assert transcript.finish("error", "why") == [
        TextDelta(0, "", (), "error", error="why"),
        TextDelta(1, "xy", (), "error", error="why"),
    ]
    assert transcript.is_finished


def test_a_failed_row_ends_its_choice_with_the_error() -> None:
    transcript = OutputProcessor(Request(0, (1,)), ByteTokenizer())
    delta = transcript.process(Delta(0, 0, finish=FinishReason.ERROR, error="not finite"))
    assert delta == TextDelta(0, "", (), "error", error="not finite")


# Refusals.


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("", "prompt: it is empty"),
        ([[]], "prompt: it is empty"),
        (5, "prompt: '5' is neither text nor a list of token ids"),
        (None, "prompt: 'None' is neither"),
        (b"ab", "prompt: \"b'ab'\" is neither"),
        ({"a": 1}, "prompt: \"{'a': 1}\" is neither"),
        ([1, 2.5], "prompt[0]: '1' is neither"),
        ([True, False], "prompt[0]: 'True' is neither"),
        (["abc", 5], "prompt[1]: '5' is neither"),
        ([[1, 2.5]], "prompt: Token ID 2.5 is out of vocabulary: ids are below 257"),
        ([257], "prompt: Token ID 257 is out of vocabulary: ids are below 257"),
        ([[1], [-1]], "prompt[1]: Token ID -1 is out of vocabulary: ids are below 257"),
        ("\ud800", "prompt: it has half a surrogate pair"),
        ("x" * 9000, "prompt: Input tokens exceed the configured limit of 8192 tokens: 9000 "),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_by_name_and_takes_nothing(prompt: Any, start: str) -> None:
    llm = LLM("hash")
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompt)
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)
    assert is_idle(llm) and llm.engine.num_steps == 0


def test_one_bad_prompt_in_a_list_is_named_and_nothing_runs() -> None:
    llm = LLM("hash")
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\]: it is empty") as caught:
        llm.generate(["good", "", "x" * 9000])
    assert (caught.value.field, caught.value.code) == ("prompt[1]", "empty_prompt")
    assert is_idle(llm) and llm.engine.num_steps == 0


def test_bad_params_of_one_of_several_prompts_are_named() -> None:
    llm = LLM("hash")
    params = [SamplingParams(), SamplingParams(max_tokens=9000)]
    with pytest.raises(InvalidRequest, match=r"^params\[1\]\.max_tokens: .*: 1 prompt tokens"):
        llm.generate(["a", "b"], params)
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("params", "start"),
    [
        ([SamplingParams()] * 3, "params: 3 for 2 prompts. Give one, or one for each"),
        ([], "params: 0 for 2 prompts"),
        (5, "params[0]: "),
        ({"temperature": 0.0}, "params[0]: "),
        ([SamplingParams(), "x"], "params[1]: "),
        (
            SamplingParams(allowed_token_ids=[257]),
            "params[0].allowed_token_ids: Token ID 257 is out of",
        ),
    ],
    ids=str,
)
def test_bad_params_are_refused_by_name_and_take_nothing(params: Any, start: str) -> None:
    llm = LLM("hash")
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["a", "b"], params)
    assert str(caught.value).startswith(start)
    assert is_idle(llm)


def test_the_error_of_a_request_that_can_never_fit_names_the_option_to_change() -> None:
    llm = LLM("hash", num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"^max_tokens: .*start with --num-blocks 7$"):
        llm.generate("abc", SamplingParams(max_tokens=100))
    assert is_idle(llm)


def test_a_stream_is_refused_when_it_is_created_not_when_it_is_read() -> None:
    llm = LLM("hash")
    with pytest.raises(InvalidRequest, match=r"^prompt: it is empty"):
        llm.stream("")
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        llm.stream(["a"])  # type: ignore[list-item]
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"max_seqs": 3}, "max_seqs"),
        ({"end_ids": (3,)}, "end_ids"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"depth": 3}, "depth"),
        ({"seed": 1.5}, "seed"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"policy": "nonesuch"}, "policy"),
        ({"policy": 5}, "policy"),
        ({"model": "nonesuch"}, "model"),
        ({"model": "/none/such"}, "model"),
        ({"model": "a/b/c"}, "model"),
        ({"model": "hash", "device": "cpu"}, "device"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"model": "owner/name", "load_format": "pickle"}, "load_format"),
        ({"model": "owner/name", "num_blocks": 0}, "num_blocks"),
        ({"model": "owner/name", "max_model_len": "many"}, "max_model_len"),
        ({"model": "hash:wheels=4"}, "model"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        LLM(**options)
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option}: ")


@pytest.mark.parametrize("draft", [{}, {"draft_model": "tiny-draft"}])
def test_a_folder_that_is_not_there_is_refused_before_packages_are_imported(
    draft: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their import takes seconds, and minutes on a busy machine."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(loader, "_open_checkpoint", None)
    for name, problem in (("none", "there is no folder"), ("file", "is a file. Name the folder")):
        with pytest.raises(InvalidConfig, match=rf"^model: .*{problem}"):
            LLM(str(tmp_path / name), **draft)


def test_without_a_name_the_model_is_that_of_the_command_line() -> None:
    entries = (LLM, AsyncLLM, AsyncLLM.spawn)
    assert {signature(each).parameters["model"].default for each in entries} == {
        MODEL_OPTION.default
    }


def test_the_error_of_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"Use max_num_seqs\. Options are: num_blocks, block"):
        LLM("hash", max_seqs=3)  # type: ignore[call-arg]


# Policies.


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_a_name(name: str) -> None:
    assert load_policy(name) is POLICIES[name]
    assert load_policy(POLICIES[name]) is POLICIES[name]


def test_an_unknown_policy_is_refused_with_the_one_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"'agein' is not known\. Use ageing\. Policies are: "):
        load_policy("agein")
    (tmp_path / "mine.py").touch()
    with pytest.raises(InvalidConfig, match=r"is not known\. Use /.*mine\.py\. Policies are"):
        load_policy(str(tmp_path / "mine"))


def test_a_policy_from_a_file_decides(tmp_path: Path) -> None:
    """One row, newest first: the second request ends before the first gets a token."""
    file = tmp_path / "newest.py"
    file.write_text(
        "from forge.policy import FCFS\n"
        "def newest(waiting, context):\n"
        "    return max(waiting, key=lambda candidate: candidate.id)\n"
        "policy = FCFS._replace(admit=newest)\n"
    )
    llm = LLM("hash", policy=str(file), max_num_seqs=1)
    older, newer = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    next(older)
    assert llm.engine.num_steps == 13
    assert len(list(newer)) == 12
    assert llm.engine.num_steps == 13


def test_a_policy_file_keeps_what_it_remembers(tmp_path: Path) -> None:
    file = tmp_path / "counting.py"
    file.write_text(
        "from collections import Counter\n"
        "from forge.policy import FCFS\n"
        "calls = Counter()\n"
        "def admit(waiting, context):\n"
        "    calls['admit'] += 1\n"
        "    return waiting[0]\n"
        "policy = FCFS._replace(admit=admit)\n"
    )
    llm = LLM("hash", policy=str(file))
    llm.generate(["a", "b"], GREEDY)
    admit: Any = llm.engine.scheduler.policy.admit
    assert admit.__globals__["calls"]["admit"] == 2


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("policy = = 1", ":1 does not run: SyntaxError: "),
        ("1 / 0", ":1 does not run: ZeroDivisionError: "),
        ("raise SystemExit(3)", ":1 does not run: SystemExit: 3"),
        ("import no_such_module", ":1 does not run: ModuleNotFoundError: "),
        ("rules = 1", " does not define `policy`"),
        ("policy = 'fcfs'", " does not define `policy`"),
        (
            "from forge.policy import POLICIES\npolicy = POLICIES['fcfs']._replace(admit=3)",
            " does not define `policy`",
        ),
    ],
    ids=str,
)
def test_a_policy_file_that_defines_no_policy_is_refused(
    tmp_path: Path, source: str, problem: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(InvalidConfig, match=r"^policy: ") as caught:
        LLM("hash", policy=str(file))
    assert f"{file}{problem}" in str(caught.value)


def test_the_line_is_that_of_the_file_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import broken_rules")
    (tmp_path / "broken_rules.py").write_text("a = 1\nb = = 2\n")
    (tmp_path / "div.py").write_text("\n1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidConfig, match=r"broken_rules\.py:2 does not run: SyntaxError"):
        LLM("hash", policy="mine.py")
    with pytest.raises(InvalidConfig, match=r"div\.py:2 does not run: ZeroDivisionError"):
        LLM("hash", policy="./div.py")
    with pytest.raises(InvalidConfig, match=r"^policy: 'x{64}' is not known"):
        LLM("hash", policy="x" * 300)


def test_a_policy_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"^policy: there is no file 'none\.py'. Use fcfs, "):
        LLM("hash", policy="none.py")


def test_a_policy_that_serves_no_request_is_an_error_that_frees_everything() -> None:
    llm = LLM("hash", policy=FCFS._replace(admit=lambda waiting, context: None))
    with pytest.raises(PolicyError, match="1 requests wait"):
        llm.generate("abc")
    assert not llm.engine.scheduler.requests
    assert not llm.engine.scheduler.pool.tables


# The end.


def test_close_ends_open_streams_as_aborted_and_frees_their_blocks() -> None:
    llm = LLM("hash")
    stream = llm.stream("abc", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    llm.close()
    assert llm.engine.scheduler.pool.num_used_blocks == 0
    assert [delta.finish_reason for delta in stream] == ["abort"]


def test_close_ends_the_requests_of_a_generate_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, step, num_steps = LLM("hash"), Engine.step, 0

    def step_and_close(engine: Engine) -> list[Delta]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            llm.close()
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_and_close)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = llm.generate(["abc", "def"], params)
    assert [each.finish_reason for each in outputs] == ["abort", "abort"]
    assert llm.engine.scheduler.pool.num_used_blocks == 0


def test_a_generate_that_is_interrupted_while_it_decodes_takes_nothing_from_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = LLM("hash").generate("stream", params)[0].token_ids
    llm = LLM("hash")
    stream = llm.stream("stream", params)
    tokens = [*next(stream).token_ids]

    class InterruptedDetokenizer:
        def extend(self, tokens: Sequence[int]) -> str:
            return ""

        def flush(self) -> str:  # at the end of the choice
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.tokenizer, "create_detokenizer", lambda _: InterruptedDetokenizer())
    with pytest.raises(KeyboardInterrupt):
        llm.generate("batch", SamplingParams(max_tokens=3, ignore_eos=True))
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == expected


class InterruptingRecorder(Recorder):
    """Presses Ctrl-C at the third call of the method."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._calls = 0

    def _interrupt(self, method: str) -> None:
        self._calls += method == self._method
        if self._calls == 3:
            self._calls += 1
            signal.raise_signal(signal.SIGINT)

    def record_submit(self, request: Request) -> None:
        self._interrupt("submit")

    def record_plan(self, plan: StepPlan | None) -> None:
        self._interrupt("plan")

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        self._interrupt("commit")

    def record_abort(self, request_id: int) -> None:
        self._interrupt("abort")


@pytest.mark.parametrize(
    ("method", "max_steps"), [("submit", 0), ("plan", 3), ("commit", 3), ("abort", 99)]
)
def test_ctrl_c_within_a_change_of_the_engine_comes_after_it(method: str, max_steps: int) -> None:
    """The plan that was just made runs, tokens of a stream are kept, and all is aborted."""
    prompts = ["a", "bc", "def"]
    with LLM("hash", depth=2) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, GREEDY)]
        stream = llm.stream("abc", GREEDY)
        llm.engine.recorder, num_steps = InterruptingRecorder(method), llm.engine.num_steps
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        assert llm.engine.num_steps - num_steps <= max_steps
        assert [token for delta in stream for token in delta.token_ids] == tokens_of("abc")
        assert [each.token_ids for each in llm.generate(prompts, GREEDY)] == expected
        assert is_idle(llm)


def tokens_of(prompt: str) -> list[int]:
    """Return the greedy tokens of the prompt alone."""
    with LLM("hash") as llm:
        return llm.generate(prompt, GREEDY)[0].token_ids


def test_a_second_ctrl_c_comes_at_once_and_ctrl_c_is_as_before_after_the_block() -> None:
    reached: list[str] = []
    for num_presses in (0, 1, 2):
        try:
            with defer_interrupt():
                for _ in range(num_presses):
                    signal.raise_signal(signal.SIGINT)
                reached.append(f"after {num_presses}")
        except KeyboardInterrupt:
            reached.append("interrupt")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert reached == ["after 0", "after 1", "interrupt", "interrupt"]


def test_ctrl_c_of_a_program_with_a_handler_of_its_own_is_not_deferred() -> None:
    calls: list[str] = []
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append("handler"))
    try:
        with defer_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert calls == ["handler"]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_thread_that_gets_no_ctrl_c_generates() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(tokens_of, "abc").result() == tokens_of("abc")


def test_a_block_closes_what_it_opened_and_closing_again_changes_nothing() -> None:
    with LLM("hash") as llm:
        stream = llm.stream("abc", GREEDY)
        next(stream)
    llm.close()
    assert [delta.finish_reason for delta in stream] == ["abort"]


def test_every_refusal_is_a_forge_error_and_a_value_error() -> None:
    for refuse in (lambda: LLM("nonesuch"), lambda: LLM("hash").generate("")):
        with pytest.raises(ForgeError) as caught:
            refuse()
        assert isinstance(caught.value, ValueError)


def test_the_page_lists_every_field_of_sampling_params_with_its_default() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "Python.md"
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(each.name, repr(each.default)) for each in fields(SamplingParams)]


def test_an_iterator_dropped_before_it_is_read_aborts_its_request() -> None:
    llm = LLM("hash")
    llm.stream("never read", SamplingParams(max_tokens=300, ignore_eos=True))
    llm.generate("b", GREEDY)
    assert is_idle(llm) and not llm._deltas_by_stream


def test_a_closed_llm_refuses_what_comes_after() -> None:
    llm = LLM("hash")
    llm.close()
    with pytest.raises(EngineDead, match=r"closed\. Open another LLM"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineDead, match=r"closed\. Open another LLM"):
        llm.stream("a", GREEDY)


def test_several_prompts_are_not_one_to_stream() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt: .* is neither text nor a list of token ids"):
        LLM("hash").stream(["a", "b"], GREEDY)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("model", "options", "gpu", "expected"),
    [
        ("Qwen/Qwen3-0.6B", {}, True, 8192),
        ("Qwen/Qwen3-0.6B", {"max_num_seqs": 5000}, True, 10_000),
        ("Qwen/Qwen3-0.6B", {"max_num_batched_tokens": 512}, True, 512),
        ("Qwen/Qwen3-0.6B", {"device": "cpu"}, True, None),
        ("Qwen/Qwen3-0.6B", {"max_num_seqs": "many"}, True, 8192),  # EngineConfig refuses it
        ("Qwen/Qwen3-0.6B", {}, False, None),
        ("hash:seed=3", {}, True, None),
        ("tiny", {}, True, None),
    ],
)
def test_llm_computes_more_tokens_in_a_step_on_a_gpu_than_a_server(
    model: str, options: Any, gpu: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.engine_options.has_gpu", lambda: gpu)
    completed = add_offline_defaults(model, options)
    assert completed.get("max_num_batched_tokens") == expected
    assert {**completed, **options} == completed


def test_an_output_that_violates_its_schema_is_an_error_of_its_choice() -> None:
    """The only text that the masks allow has a name twice."""
    schema = {
        "type": "object",
        "patternProperties": {"^k$": {"const": 1}},
        "additionalProperties": False,
        "minProperties": 2,
        "maxProperties": 2,
    }
    params = SamplingParams(max_tokens=50, n=2, structure=Structure.json_schema(schema))
    with LLM("hash") as llm:
        outputs = llm.generate(["a", "b"], params)
    choices = [choice for output in outputs for choice in output.choices]
    assert [choice.finish_reason for choice in choices] == ["error"] * 4
    assert all("the name 'k' comes twice" in str(choice.error) for choice in choices)
