"""KV tiers as options of an LLM: what is found in host memory and files, restarts, recordings."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from forge import LLM, SamplingParams
from forge.config import HostTier
from forge.errors import InvalidConfig
from forge.models.embedded import embedded_folder
from forge.request import CachedTokens
from forge.sim.replay import replay
from forge.tier_options import GIB, TierOptions

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""
SMALL: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 128}
HOST: dict[str, Any] = {**SMALL, "kv_host_gib": 64 * 16 / GIB}
"""64 host blocks of four tokens, four bytes each."""
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = "the same words"
"""14 tokens: three blocks can be shared, and with the output four are full."""
FILLERS = ("B" * 108, "C" * 122)
"""Prompts: the first leaves four blocks of the device, which are stored, the second takes all."""
FILES_BYTES = 10**6


def files(folder: Path) -> dict[str, Any]:
    return {**HOST, "kv_disk_path": str(folder), "kv_disk_gib": FILES_BYTES / GIB}


def serve(llm: LLM) -> list[tuple[str, CachedTokens]]:
    """Serve the prompt twice, then others, then the prompt again; return text and cached tokens."""
    found = []
    for prompt in (PROMPT, PROMPT, *FILLERS, PROMPT):
        (output,) = llm.generate(prompt, GREEDY)
        if prompt == PROMPT:
            found.append((output.text, output.cached_tokens))
    return found


def expected_text() -> str:
    with LLM("hash", **SMALL) as llm:
        return llm.generate(PROMPT, GREEDY)[0].text


def test_a_prefix_that_left_the_device_comes_from_host_memory() -> None:
    with LLM("hash", **HOST) as llm:
        texts, cached = zip(*serve(llm), strict=True)
        assert set(texts) == {expected_text()}
        assert cached[:2] == (CachedTokens(written=12), CachedTokens(device=12))
        assert cached[2] == CachedTokens(host=12)
        assert llm.engine.scheduler.num_loaded_tokens == 12


def test_without_host_memory_what_left_the_device_is_computed() -> None:
    with LLM("hash", **SMALL) as llm:
        assert serve(llm)[2][1] == CachedTokens(written=12)
        assert llm.engine.config.host_tier is None


def test_a_prefix_survives_a_restart_in_files(tmp_path: Path) -> None:
    """The second engine has neither the device's blocks nor the host's."""
    with LLM("hash", **files(tmp_path / "kv")) as llm:
        texts = [text for text, _ in serve(llm)]
    with LLM("hash", **files(tmp_path / "kv")) as llm:
        (text, cached), *others = serve(llm)
    assert {text, *texts, *(text for text, _ in others)} == {expected_text()}
    assert cached == CachedTokens(disk=12)


def test_another_model_finds_nothing_in_the_folder(tmp_path: Path) -> None:
    with LLM("hash", **files(tmp_path / "kv")) as llm:
        serve(llm)
    with LLM("hash:seed=1", **files(tmp_path / "kv")) as llm:
        assert serve(llm)[0][1].total == 0
    with LLM("hash", **{**files(tmp_path / "kv"), "block_size": 2, "num_blocks": 64}) as llm:
        assert serve(llm)[0][1].total == 0


def test_recordings_replay_without_the_files(tmp_path: Path) -> None:
    """The keys at the start and the answers of files are in the recording."""
    recordings = [tmp_path / "first", tmp_path / "second"]
    num_requests = dict[Path, int]()
    for recording in recordings:
        with LLM("hash", **files(tmp_path / "kv"), record=str(recording)) as llm:
            found = serve(llm)
            num_requests[recording] = 3 + len(FILLERS)
            while llm.engine.scheduler.disk_cache.has_moves:  # a later step has their answers
                time.sleep(0.01)
                llm.generate(PROMPT, GREEDY)
                num_requests[recording] += 1
    shutil.rmtree(tmp_path / "kv")
    assert found[0][1] == CachedTokens(disk=12)
    for recording, has_keys in zip(recordings, (False, True), strict=True):
        lines = recording.read_text().splitlines(keepends=True)
        entries = [json.loads(line.partition(" ")[2]) for line in lines]
        assert any("disk_keys" in entry for entry in entries) == has_keys
        assert any(entry.get("answers") for entry in entries)
        result = replay(lines)
        assert result.difference is None and result.is_complete, recording
        assert result.requests == num_requests[recording]


def test_choices_of_a_request_count_its_cached_tokens_once() -> None:
    with LLM("hash", num_blocks=64, block_size=4) as llm:
        llm.generate(PROMPT, GREEDY)
        for params in (SamplingParams(n=3, max_tokens=4), SamplingParams(n=3, max_tokens=1)):
            (output,) = llm.generate(PROMPT, params)
            assert output.cached_tokens == CachedTokens(device=12)


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [(PROMPT, CachedTokens()), (PROMPT + ", and more of it", CachedTokens(written=16))],
)
@pytest.mark.parametrize(
    "tier", [{"num_blocks": 64, "block_size": 4}, HOST], ids=["device", "host memory"]
)
def test_what_a_choice_finds_is_not_cached_where_another_computes_the_whole_prompt(
    prompt: str, counts: CachedTokens, tier: dict[str, Any]
) -> None:
    """The second choice has no prompt logprobs, and the policy admits it first."""
    with LLM("hash", policy="newest", **{**tier, "max_num_seqs": 1}) as llm:
        llm.generate([PROMPT, PROMPT, *FILLERS], GREEDY)
        params = SamplingParams(n=2, prompt_logprobs=1, max_tokens=4)
        deltas = list(llm.stream(prompt, params))
    assert deltas[0].choice == 1
    total = CachedTokens()
    for delta in deltas:
        total = total.plus(delta.cached_tokens)
    assert total == counts


def test_a_request_that_is_preempted_counts_its_cached_tokens_once() -> None:
    """When it goes on it finds its own blocks too."""
    with LLM("hash", num_blocks=64, block_size=4) as llm:
        llm.generate(PROMPT, GREEDY)
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        stream = llm.stream(PROMPT + ", and more of it", params)
        deltas = [next(stream) for _ in range(3)]
        scheduler = llm.engine.scheduler
        scheduler.void("a step failed")
        deltas += stream
        assert scheduler.num_preemptions == 1
    assert [delta.cached_tokens.total for delta in deltas if delta.cached_tokens.total] == [12]
    # 30 tokens: three blocks are the first prompt's, and four are new.
    assert deltas[-1].cached_tokens == CachedTokens(device=12, written=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_gib": -1}, "kv_host_gib: -1 is not a number of GiB from 0 to"),
        ({"kv_host_gib": float("nan")}, "kv_host_gib: nan is not a number"),
        ({"kv_host_gib": "8"}, "kv_host_gib: '8' is not a number"),
        ({"kv_host_gib": True}, "kv_host_gib: True is not a number"),
        ({"kv_host_gib": 1e-9}, r"kv_host_gib: it is less than one block of 64 bytes\. Give 6e-08"),
        ({"kv_host_gib": 2}, r"kv_host_gib: 33554432 times a block of 64 bytes .* Give 1 or less"),
        (
            {"kv_host_gib": 1e-3, "enable_prefix_caching": False},
            "kv_host_gib: blocks in host memory are found by their prefix.* Enable it",
        ),
        ({"kv_disk_path": "kv"}, "kv_disk_path: its files have no limit .* Give kv_disk_gib"),
        ({"kv_disk_gib": 1}, "kv_disk_gib: no folder is named .* Give kv_disk_path"),
        ({"kv_disk_path": "kv", "kv_disk_gib": 1}, "kv_disk_path: .* kv_host_gib is 0"),
        ({"kv_disk_path": 3, "kv_disk_gib": 1, "kv_host_gib": 1e-3}, "kv_disk_path: 3 names no"),
        (
            {"kv_disk_path": "a\0b", "kv_disk_gib": 1, "kv_host_gib": 1e-3},
            r"kv_disk_path: 'a\\x00b' cannot be opened as a folder: embedded null byte\. Name",
        ),
        (
            {"kv_disk_path": "\ud800", "kv_disk_gib": 1, "kv_host_gib": 1e-3},
            r"kv_disk_path: '\\ud800' cannot be opened as a folder",
        ),
        (
            {"kv_disk_path": "kv", "kv_disk_gib": 0, "kv_host_gib": 1e-3},
            "kv_disk_gib: it is less than one file of a block",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidConfig, match=message):
        LLM("hash", **options)
    assert not list(tmp_path.iterdir()), "a refused option makes no folder"


def test_a_folder_may_be_named_by_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell leaves the ~ of --kv-disk-path=~/kv as it is."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(home))
    with LLM("hash", **files(Path("~/kv"))):
        assert (home / "kv").is_dir() and not list(elsewhere.iterdir())


@pytest.mark.parametrize("block_bytes", [67, 150_001, 12_345_677, 13_107_200])
@pytest.mark.parametrize("refused_gib", [1e-9, 2**20])
def test_a_size_that_a_refusal_names_is_accepted(refused_gib: float, block_bytes: int) -> None:
    def host_tier(kv_host_gib: float) -> HostTier | None:
        options = TierOptions(kv_host_gib=kv_host_gib)
        return options.host_tier(block_bytes, block_bytes, enable_prefix_caching=True)

    with pytest.raises(InvalidConfig) as refused:
        host_tier(refused_gib)
    (remedy,) = re.findall(r"Give (\S+) or", str(refused.value))
    assert host_tier(float(remedy)) is not None


@pytest.mark.parametrize("model", ["tiny", pytest.param(TINY, marks=pytest.mark.torch)])
def test_a_checkpoint_finds_its_prefixes_in_files_after_a_restart(
    model: str, tmp_path: Path
) -> None:
    if model == TINY:
        pytest.importorskip("torch")
    options = {**files(tmp_path / "kv"), "kv_host_gib": 0.01, "kv_disk_gib": 0.01}
    options |= {"device": "cpu", "kv_load_rule": "always"}
    with LLM(model, **SMALL, device="cpu") as llm:
        texts = {text for text, _ in serve(llm)}
    with LLM(model, **options) as llm:
        first = serve(llm)
    with LLM(model, **options) as llm:
        second = serve(llm)
    assert texts == {text for text, _ in (*first, *second)} and len(texts) == 1
    assert first[2][1].host == second[0][1].disk > 0


@pytest.mark.torch
def test_a_checkpoint_refuses_host_memory_without_prefix_caching() -> None:
    pytest.importorskip("torch")
    with pytest.raises(InvalidConfig, match="kv_host_gib: blocks in host memory are found by"):
        LLM(TINY, kv_host_gib=0.01, enable_prefix_caching=False, device="cpu")


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidConfig, match=r"kv_disk_path: .* chmod 700"):
        LLM("hash", **files(tmp_path))


def test_the_budget_in_bytes_bounds_the_keys_that_are_kept() -> None:
    options = TierOptions(kv_host_gib=1, kv_disk_path="kv", kv_disk_gib=1)
    tier = options.host_tier(2**20, 2**21, enable_prefix_caching=True)
    assert tier is not None and tier.disk is not None
    assert (tier.num_blocks, tier.disk.max_files) == (1024, 512)
    assert TierOptions().host_tier(1, 1, enable_prefix_caching=False) is None


def test_a_recording_has_the_sizes_of_both_pools(tmp_path: Path) -> None:
    with LLM("hash", **HOST, record=str(tmp_path / "recording")) as llm:
        serve(llm)
        llm.engine.resize(28, 2)
        llm.generate(PROMPT, GREEDY)
        llm.engine.resize(num_host_blocks=8)
        llm.engine.resize(32)
        serve(llm)
        for refused in ((0, None), (None, -1), (True, None), (2**30, None)):
            with pytest.raises(InvalidConfig, match="is not an integer from"):
                llm.engine.resize(*refused)
        assert llm.engine.scheduler.pool.num_blocks == 32
        assert llm.engine.scheduler.host_cache.num_blocks == 8
    lines = (tmp_path / "recording").read_text().splitlines(keepends=True)
    entries = [json.loads(line.partition(" ")[2]) for line in lines]
    sizes = [entry["resize"] for entry in entries if "resize" in entry]
    assert sizes == [[28, 2], [None, 8], [32, None]]
    result = replay(lines)
    assert result.difference is None and result.is_complete


def test_an_engine_without_host_memory_resizes_the_device_alone() -> None:
    with LLM("hash", **SMALL) as llm:
        with pytest.raises(InvalidConfig, match="num_host_blocks: this engine has no host pool"):
            llm.engine.resize(8, 8)
        assert llm.engine.scheduler.pool.num_blocks == 32
        llm.engine.resize(8)
        assert llm.engine.scheduler.pool.num_blocks == 8
