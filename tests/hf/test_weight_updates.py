"""Updates of a checkpoint's weights in place: outputs equal those of a fresh start, to the token.

Every kind of decoder and of stacked or tied weights, from files and from tensors, after a start
with a record and without one; and the memory that a sleep frees.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from forge import LLM, SamplingParams  # noqa: E402
from forge.errors import EngineDead, EnginePaused, InvalidWeights  # noqa: E402
from forge.models.hf.model import HFModel, check_free_memory  # noqa: E402
from forge.models.hf.weights import ModelWeights  # noqa: E402
from forge.weights import NamedWeights, WeightFiles  # noqa: E402
from tests.hf.families import SMALL, create_module, create_module_from_config  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch
FUSED = ("llama", "qwen2", "qwen3", "phi3")
MODULES = ("gpt2", "gemma2")
PROMPTS = [[5, 9, 31, 77], [40, 41, 42, 43, 44, 45]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
OPTIONS: Any = {"device": "cpu", "num_blocks": 64, "max_model_len": 128}


class Trained:
    """A checkpoint, further weights of its shape, and what a fresh start with those generates."""

    def __init__(self, root: Path, family: str) -> None:
        self.folder = save_checkpoint(root / family, family)
        self.new_folder = save_checkpoint(root / f"{family} new", family)
        create_module(family, torch.float32, seed=1).save_pretrained(self.new_folder)
        self.new_file = self.new_folder / "model.safetensors"
        self.old_tensors = load_file(self.folder / "model.safetensors")
        self.new_tensors = load_file(self.new_file)
        with LLM(str(self.new_folder), **OPTIONS) as llm:
            self.new_outputs = generate(llm)
        with LLM(str(self.folder), **OPTIONS) as llm:
            self.old_outputs = generate(llm)
        assert self.old_outputs != self.new_outputs


def generate(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of checkpoints and records, which this module alone has."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("updates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def qwen3(root: Path) -> Trained:
    return Trained(root, "qwen3")


def weights_of(llm: LLM) -> ModelWeights:
    model = llm.engine.model
    assert isinstance(model, HFModel) and model._weights is not None
    return model._weights


def addresses(llm: LLM) -> dict[str, int]:
    parameters = weights_of(llm)._parameters
    return {name: tensor.data_ptr() for name, tensor in parameters.items()}


@pytest.mark.long
@pytest.mark.parametrize("family", [*FUSED, *MODULES])
def test_every_family_is_updated_in_place(root: Path, family: str) -> None:
    """From a file after a start with a record, where the family has one; from tensors without."""
    trained = Trained(root, family)
    with LLM(str(trained.folder), **OPTIONS) as llm:
        before = addresses(llm)
        assert trained.new_tensors.keys() <= before.keys()
        assert llm.update_weights(WeightFiles((str(trained.new_file),))) == "1"
        assert generate(llm) == trained.new_outputs
        assert llm.update_weights(trained.old_tensors.items(), "old") == "old"
        assert generate(llm) == trained.old_outputs
        assert addresses(llm) == before


@pytest.mark.parametrize("has_record", [True, False])
def test_open_streams_go_on_with_the_new_weights(
    qwen3: Trained, has_record: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rest of a stream is what a fresh start generates after the same tokens."""
    if not has_record:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(str(qwen3.folder), depth=2, **OPTIONS) as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        begun = [[*next(stream).token_ids, *next(stream).token_ids] for stream in streams]
        llm.pause("keep")
        with pytest.raises(EnginePaused, match="Call resume first"):
            llm.generate(PROMPTS, GREEDY)
        llm.update_weights(qwen3.new_tensors, "step 1")
        llm.resume()
        outputs = [
            tokens + [token for delta in stream for token in delta.token_ids]
            for tokens, stream in zip(begun, streams, strict=True)
        ]
        assert generate(llm) == qwen3.new_outputs
        assert llm.weight_version == "step 1"
    assert all(len(tokens) == 10 for tokens in outputs)
    with LLM(str(qwen3.new_folder), **OPTIONS) as fresh:
        for prompt, tokens, old in zip(PROMPTS, outputs, qwen3.old_outputs, strict=True):
            kept = next(
                (i for i, pair in enumerate(zip(tokens, old, strict=True)) if len({*pair}) > 1), 10
            )
            continuations = [
                fresh.generate([prompt + tokens[:num]], GREEDY)[0].token_ids[: 10 - num]
                for num in range(kept + 1)
            ]
            # At some number of tokens the weights have changed, and from there all are new.
            assert any(tokens[num:] == new for num, new in enumerate(continuations))


def test_a_part_of_the_tensors_can_be_updated(qwen3: Trained) -> None:
    """One of three that are stacked: the other two stay."""
    name = "model.layers.1.self_attn.k_proj.weight"
    with LLM(str(qwen3.folder), **OPTIONS) as llm:
        llm.update_weights({name: qwen3.new_tensors[name]})
        assert generate(llm) != qwen3.old_outputs
        for each in ("q", "v"):
            other = name.replace("k_proj", f"{each}_proj")
            assert torch.equal(weights_of(llm)._parameters[other], qwen3.old_tensors[other])
        llm.update_weights({name: qwen3.old_tensors[name]})
        assert generate(llm) == qwen3.old_outputs


def test_a_tensor_that_does_not_match_changes_nothing(qwen3: Trained, tmp_path: Path) -> None:
    good, name = qwen3.new_tensors, "model.norm.weight"
    cut, other = tmp_path / "cut.safetensors", tmp_path / "other.safetensors"
    cut.write_bytes(qwen3.new_file.read_bytes()[:-8])
    save_file({name: good[name]}, other)
    refused: list[tuple[Any, str]] = [
        (
            {**good, "model.norm.wight": good[name]},
            "norm.wight: the model has no such tensor. Its n",
        ),
        ({**good, name: good[name][:-1]}, r"its shape is \[63\], the model's \[64\]"),
        ({**good, name: good[name].int()}, "its dtype is torch.int32"),
        ({**good, name: [1.0]}, "a list is no tensor"),
        ({**good, name: torch.empty(64, device="meta")}, "it has no content"),
        ({}, "there are none"),
        (WeightFiles((str(qwen3.new_file), str(other))), "it is in two files"),
        (WeightFiles((str(cut),)), "cannot be read"),
        (WeightFiles((str(tmp_path / "none.safetensors"),)), "cannot be read"),
    ]
    with LLM(str(qwen3.folder), **OPTIONS) as llm:
        for source, message in refused:
            with pytest.raises(InvalidWeights, match=message):
                llm.update_weights(source)
        assert llm.weight_version == "0" and generate(llm) == qwen3.old_outputs


@pytest.mark.parametrize("has_record", [True, False])
def test_an_update_may_have_the_names_that_a_start_reads(
    qwen3: Trained, has_record: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The base model's prefix may be missing, and tensors of no weight are left out."""
    if not has_record:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tensors = {name.removeprefix("model."): each for name, each in qwen3.new_tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    with LLM(str(qwen3.folder), **OPTIONS) as llm:
        llm.update_weights(tensors)
        assert generate(llm) == qwen3.new_outputs
        for name in ("norm.bias", "layers.3.mlp.up_proj.weight"):
            with pytest.raises(InvalidWeights, match="the model has no such tensor"):
                llm.update_weights({**tensors, name: torch.zeros(3)})
        with pytest.raises(InvalidWeights, match=r"it is model\.norm\.weight again"):
            llm.update_weights({**tensors, "model.norm.weight": tensors["norm.weight"]})
        assert generate(llm) == qwen3.new_outputs


def test_buffers_that_a_checkpoint_has_are_updated_too(root: Path) -> None:
    """The bias of GLM 4.5's router is a buffer of its module and a tensor of its files."""
    folder = save_checkpoint(root / "router")
    config = transformers.Glm4MoeConfig(
        **{**SMALL, "num_hidden_layers": 2, "head_dim": 16, "n_routed_experts": 8},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    )
    for seed in (0, 1):
        module = create_module_from_config(config, torch.float32, seed=seed)
        bias = module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
        bias.copy_(torch.arange(8.0) * (1 - 2 * seed))
        new = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        if seed == 0:
            module.save_pretrained(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        generate(llm)
        llm.update_weights(new)
        module.save_pretrained(folder)
        with LLM(str(folder), **OPTIONS) as fresh:
            assert generate(llm) == generate(fresh)


def test_two_names_of_one_tensor_must_agree() -> None:
    tensor = torch.zeros(4, 2)
    weights = ModelWeights({"embedding": tensor, "head": tensor, "norm": torch.zeros(2)})
    new = torch.ones(4, 2)
    with pytest.raises(InvalidWeights, match="head: it differs from embedding"):
        weights.update(NamedWeights({"norm": torch.ones(2), "embedding": new, "head": new + 1}))
    assert not tensor.any()
    weights.update(NamedWeights({"embedding": new, "head": new.bfloat16()}))
    assert torch.equal(tensor, new)


def test_an_update_that_fails_halfway_ends_the_engine(qwen3: Trained) -> None:
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
            if func is torch.Tensor.copy_:
                raise RuntimeError("an illegal memory access")
            return super().__torch_function__(func, *args, **kwargs)

    name = "model.norm.weight"
    with LLM(str(qwen3.folder), **OPTIONS) as llm:
        broken = qwen3.new_tensors[name].as_subclass(Broken)
        with pytest.raises(EngineDead, match="failed halfway: RuntimeError"):
            llm.update_weights({**qwen3.new_tensors, name: broken})
        with pytest.raises(EnginePaused, match="Call resume first"):
            generate(llm)
        with pytest.raises(EnginePaused, match="Update them all"):
            llm.resume()
        with pytest.raises(InvalidWeights, match="is missing"):
            llm.update_weights({name: qwen3.new_tensors[name]})
        llm.update_weights(qwen3.new_tensors)
        llm.resume()
        assert generate(llm) == qwen3.new_outputs


@pytest.mark.parametrize("kind", [pytest.param("draft model", marks=pytest.mark.long), "files"])
def test_a_draft_model_and_kv_tiers_go_on_after_updates_and_sleep(
    qwen3: Trained, tmp_path: Path, kind: str
) -> None:
    """The draft keeps its weights at level 2 too; no block of earlier weights comes back."""
    options: Any = {"draft_model": str(qwen3.folder), "num_speculative_tokens": 2}
    if kind == "files":
        options = {"kv_host_gib": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_gib": 0.01}
    with LLM(str(qwen3.folder), **OPTIONS, **options) as llm:
        assert generate(llm) == generate(llm) == qwen3.old_outputs
        llm.update_weights(qwen3.new_tensors)
        assert generate(llm) == generate(llm) == qwen3.new_outputs
        llm.pause()
        llm.sleep(1)
        llm.wake()
        llm.resume()
        assert generate(llm) == qwen3.new_outputs
        llm.pause()
        llm.sleep(2)
        llm.wake()
        llm.update_weights(qwen3.old_tensors)
        llm.resume()
        assert generate(llm) == generate(llm) == qwen3.old_outputs


def test_a_wake_is_refused_where_the_trainer_has_the_memory() -> None:
    check_free_memory(2**30, 2**30)
    with pytest.raises(EnginePaused, match=r"needs 2.0 GiB, and the GPU has 1.5 free"):
        check_free_memory(2**31, 3 * 2**29)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_memory_that_comes_back(qwen3: Trained, level: int) -> None:
    with LLM(str(qwen3.folder), **OPTIONS) as llm:
        assert generate(llm) == qwen3.old_outputs
        model = llm.engine.model
        assert isinstance(model, HFModel)
        data = model._runner.kv_cache.data
        llm.pause()
        parts = llm.sleep(level)
        assert parts.keys() == {"graphs", "weights", "kv_cache"}
        assert data.untyped_storage().nbytes() == 0
        stacked = weights_of(llm)._parameters["model.layers.0.self_attn.q_proj.weight"]
        assert stacked.untyped_storage().nbytes() == 0
        assert llm.wake().keys() == parts.keys()
        expected = qwen3.old_outputs
        if level == 2:
            some = dict(list(qwen3.new_tensors.items())[:-1])
            with pytest.raises(InvalidWeights, match="it is missing"):
                llm.update_weights(some)
            assert torch.isnan(stacked).all()
            llm.update_weights(qwen3.new_tensors)
            expected = qwen3.new_outputs
        llm.resume()
        assert generate(llm) == expected
