"""A checkpoint is loaded as transformers loads it, or refused in one line before any weight is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_hub import errors as hub_errors  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.loading import checkpoint_files  # noqa: E402
from forge.models.hf.loading.checkpoint import (  # noqa: E402
    Checkpoint,
    load_module,
    mean_layer_weights,
    open_checkpoint,
    select_device,
)
from forge.models.hf.loading.checkpoint_files import (  # noqa: E402
    read_sampling_defaults,
    weight_files,
)
from forge.models.hf.loading.config_checks import refuse_unsupported  # noqa: E402
from forge.models.hf.loading.end_tokens import EndToken  # noqa: E402
from tests.hf.families import CONFIGS, FAMILIES, SMALL, create_module  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family. Tests read them only."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        create_module(family, torch.float32).save_pretrained(root / family)
    return root


@pytest.fixture
def checkpoint_folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A complete small checkpoint, for a test to damage."""
    return Path(shutil.copytree(checkpoints / "llama", tmp_path / "llama"))


def change_json(checkpoint_folder: Path, name: str, **fields: Any) -> None:
    """Change fields of a JSON file in the folder."""
    path = checkpoint_folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


def open_folder(checkpoint_folder: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(str(checkpoint_folder), CPU, **options)


def load_folder(checkpoint_folder: Path, load_format: str = "auto", **options: Any) -> Any:
    return load_module(
        open_folder(checkpoint_folder, load_format=load_format, **options),
        CPU,
        load_format,
        "eager",
    )


def refuse_open(
    checkpoint_folder: Path | str, load_format: str = "auto", option: str = "model"
) -> str:
    """Return the refusal's line. Opening alone must raise it."""
    with pytest.raises(InvalidConfig) as caught:
        open_checkpoint(str(checkpoint_folder), CPU, load_format=load_format)
    assert caught.value.option == option
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refuse_load(checkpoint_folder: Path) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load_folder(checkpoint_folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def logits(module: Any) -> Any:
    return module(IDS).logits


# What is loaded.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_computes_what_was_saved(checkpoints: Path, family: str) -> None:
    module = load_folder(checkpoints / family)
    assert torch.equal(logits(module), logits(create_module(family, torch.float32)))
    assert not module.training
    assert not any(tensor.requires_grad for tensor in module.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_neither_embedding_nor_head_counts_as_a_layer(family: str) -> None:
    module = create_module(family, torch.float32)
    layers = module.model.layers
    num_weights = sum(tensor.numel() for tensor in layers.parameters())
    final_norm = SMALL["hidden_size"]
    assert mean_layer_weights(module) == (num_weights + final_norm) // len(layers)


def test_a_checkpoint_in_several_files_is_the_same_one(checkpoints: Path, tmp_path: Path) -> None:
    create_module("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(weight_files(tmp_path)) > 2
    assert torch.equal(logits(load_folder(tmp_path)), logits(load_folder(checkpoints / "llama")))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_make_a_module_that_is_like_a_new_one(
    checkpoints: Path, family: str
) -> None:
    """Buffers and vectors follow each class's rules; matrices are random; ties stay."""
    module, new = load_folder(checkpoints / family, "dummy"), create_module(family, torch.float32)
    new = type(new)(CONFIGS[family]())
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    assert parameters.keys() == dict(new.named_parameters()).keys()
    assert buffers.keys() == dict(new.named_buffers()).keys()
    for name, tensor in new.named_buffers():
        assert torch.equal(buffers[name], tensor), name
    for name, tensor in new.named_parameters():
        if tensor.dim() == 1:
            assert torch.equal(parameters[name], tensor), name
        else:
            assert abs(parameters[name].std().item() / 0.02 - 1) < 0.1, name
    assert logits(module).isfinite().all()


def test_random_weights_are_the_same_every_time_and_need_no_files(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "model.safetensors").unlink()
    one, two = load_folder(checkpoint_folder, "dummy"), load_folder(checkpoint_folder, "dummy")
    assert torch.equal(logits(one), logits(two))


def test_a_module_has_the_requested_dtype(checkpoint_folder: Path) -> None:
    change_json(checkpoint_folder, "config.json", dtype="bfloat16")
    for name, dtype in {"auto": torch.bfloat16, "float64": torch.float64}.items():
        for load_format in ("auto", "dummy"):
            module = load_folder(checkpoint_folder, load_format, dtype=name)
            assert {tensor.dtype for tensor in module.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("stored", "on_cpu", "on_cuda"),
    [
        (None, torch.float32, torch.bfloat16),
        ("float16", torch.float32, torch.float16),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
    ],
)
def test_the_dtype_is_the_checkpoints_or_suits_the_device(
    checkpoint_folder: Path, stored: str | None, on_cpu: Any, on_cuda: Any
) -> None:
    change_json(checkpoint_folder, "config.json", dtype=stored)
    found = [
        open_checkpoint(str(checkpoint_folder), torch.device(name)).dtype
        for name in ("cpu", "cuda")
    ]
    assert found == [on_cpu, on_cuda]


def test_ends_are_those_of_both_files_with_their_origins(checkpoint_folder: Path) -> None:
    change_json(checkpoint_folder, "config.json", eos_token_id=[2, 5])
    change_json(checkpoint_folder, "generation_config.json", eos_token_id=[9, 2, 10**6])
    both = ("generation_config.json", "config.json")
    assert open_folder(checkpoint_folder).ends == (
        EndToken(9, both[:1]),
        EndToken(2, both),
        EndToken(10**6, both[:1]),
        EndToken(5, both[1:]),
    )
    (checkpoint_folder / "generation_config.json").unlink()
    change_json(checkpoint_folder, "config.json", eos_token_id=None)
    assert open_folder(checkpoint_folder).ends == ()
    config = json.loads((checkpoint_folder / "config.json").read_text())
    del config["eos_token_id"]
    (checkpoint_folder / "config.json").write_text(json.dumps(config))
    assert open_folder(checkpoint_folder).ends == (EndToken(2, ("LlamaConfig's default",)),)


def test_defaults_of_sampling_are_what_the_file_says(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "generation_config.json"
    fields = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 7, "do_sample": False}
    change_json(checkpoint_folder, file.name, **fields, max_new_tokens=9)
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert read_sampling_defaults(checkpoint_folder, "auto").fields == expected
    assert read_sampling_defaults(Path("elsewhere"), str(checkpoint_folder)).fields == expected
    assert read_sampling_defaults(checkpoint_folder, "none").fields == {}
    change_json(checkpoint_folder, file.name, top_p=1.5)
    remedy = "Fix it, or start with --generation-config none"
    with pytest.raises(InvalidConfig, match=f"generation_config: top_p of .*1.5.*{remedy}"):
        read_sampling_defaults(checkpoint_folder, "auto")
    file.unlink()
    assert read_sampling_defaults(checkpoint_folder, "auto").fields == {}
    with pytest.raises(InvalidConfig, match=r"has no generation_config.json. Give auto, none"):
        read_sampling_defaults(checkpoint_folder, str(checkpoint_folder))


def test_the_longest_sequence_is_at_most_the_checkpoints(checkpoints: Path) -> None:
    checkpoint = open_folder(checkpoints / "llama")
    assert [checkpoint.resolve_max_model_len(given) for given in (None, 1, 2048)] == [2048, 1, 2048]
    with pytest.raises(InvalidConfig, match=r"^max_model_len: 2049 is more than the 2048 posit"):
        checkpoint.resolve_max_model_len(2049)
    unsaid = checkpoint._replace(max_model_len=None)
    assert unsaid.resolve_max_model_len(10**6) == 10**6
    with pytest.raises(InvalidConfig, match=r"^max_model_len: the checkpoint does not say"):
        unsaid.resolve_max_model_len(None)


def test_a_name_of_the_hub_is_found_in_the_local_cache_and_another_is_not(
    checkpoints: Path, tmp_path: Path
) -> None:
    """In a process that may not use a network."""
    cached = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(checkpoints / "qwen3", cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    program = """
import torch
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.loading.checkpoint import open_checkpoint  # noqa: E402
for name in ("owner/name", "owner/other", "owner/.."):
    try:
        print(open_checkpoint(name, torch.device("cpu")).module_class.__name__)
    except InvalidConfig as refused:
        print(refused)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stderr == ""
    found, other, bad = run.stdout.splitlines()
    assert found == "Qwen3ForCausalLM"
    assert re.match(r"model: owner/other is no folder here and not in the local cache, and", other)
    assert re.match(r"model: owner/.. cannot be fetched: ", bad)


# What is refused.


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            "GatedRepoError",
            403,
            "owner/name is gated, and this account has no access. "
            "Request access at https://huggingface.co/owner/name and log in",
        ),
        (
            "RepositoryNotFoundError",
            404,
            "there is no folder 'owner/name', and no such id at https://huggingface.co. "
            "Check the name",
        ),
        ("HfHubHTTPError", 500, "owner/name cannot be fetched: no. Name a folder"),
    ],
)
def test_what_the_hub_refuses_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: str, status: int, line: str
) -> None:
    def fetch(name: str, **_: object) -> str:
        response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
        raise getattr(hub_errors, error)("no", response=response)

    monkeypatch.setattr(checkpoint_files, "snapshot_download", fetch)
    assert refuse_open("owner/name") == f"model: {line}"


def test_a_missing_gpu_is_refused_only_where_one_is_requested() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert select_device("auto") == select_device("cpu") == CPU
    with pytest.raises(InvalidConfig, match=r"^device: there is no cuda: torch .*\. Give cpu$"):
        select_device("cuda")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "there is no folder '" in refuse_open(tmp_path / "none")
    assert "there is no folder '" in refuse_open("~/none/of/these")
    assert "there is no folder '" in refuse_open("/" + "a" * 5000)
    (tmp_path / "model.gguf").touch()
    assert "is a file. Name the folder" in refuse_open(tmp_path / "model.gguf")
    assert "has no config.json. Name the folder of a checkpoint, or hash" in refuse_open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 10**5])
def test_a_config_that_is_not_json_is_refused(checkpoint_folder: Path, text: str) -> None:
    (checkpoint_folder / "config.json").write_text(text)
    assert "config.json is not JSON. Fetch it again" in refuse_open(checkpoint_folder)


def test_a_config_that_is_no_object_is_refused(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "config.json").write_text("[1]")
    assert "config.json holds no JSON object" in refuse_open(checkpoint_folder)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": "nonesuch"}, "knows no model type 'nonesuch'. Serve a model it knows"),
        ({"model_type": None}, "names no model_type"),
        (
            {"model_type": "new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}},
            "needs code of the checkpoint (configuration_new.NewConfig), and no code of a checkp",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "and this one is (gptq). Serve the"),
        ({"quantization_config": {"bits": 4}}, "and this one is (by an unnamed method)"),
        ({"quantization_config": {}}, "is empty. Remove it if the weights are not quantised"),
        ({"transformers_weights": "other.safetensors"}, "Rename them to model.safetensors and"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1, which must be 1 or more. Fix it"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, which must be 1 or more. Fix it"),
        ({"vocab_size": 0}, "vocab_size 0, which must be 1 or more"),
        ({"intermediate_size": -96}, "intermediate_size -96, which must be 1 or more"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0, which must be 1 or more"),
        ({"head_dim": -16}, "head_dim -16, which must be 1 or more"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4, no multiple of its num_key_value_"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is",
        ),
        ({"architectures": ["LlamaModel"]}, "for llama that is LlamaForCausalLM. Serve a check"),
        ({"hidden_size": "many"}, "config.json is not understood: "),
        ({"vision_config": {"depth": 2}}, "LlamaForCausalLM is not about text alone (vision_conf"),
        ({"dtype": "float8_e4m3fn"}, "the checkpoint is in torch.float8_e4m3fn, which is not"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_served_is_refused(
    checkpoint_folder: Path, fields: dict[str, Any], problem: str
) -> None:
    change_json(checkpoint_folder, "config.json", **fields)
    assert problem in refuse_open(
        checkpoint_folder, option="dtype" if "dtype" in fields else "model"
    )


def test_code_of_a_checkpoint_that_transformers_does_not_need_is_not_run(
    checkpoint_folder: Path,
) -> None:
    """Many models that transformers supports by now still name their original code."""
    (checkpoint_folder / "mine.py").write_text("raise SystemExit('it runs')\n")
    fields = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    change_json(checkpoint_folder, "config.json", auto_map=fields)
    assert type(load_folder(checkpoint_folder)).__name__ == "LlamaForCausalLM"


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder and decoder": (
        lambda: transformers.T5Config(architectures=["T5ForConditionalGeneration"]),
        "T5ForConditionalGeneration is an encoder and a decoder",
    ),
    "encoder": (
        lambda: transformers.BertConfig(architectures=["BertForMaskedLM"]),
        "BertForMaskedLM is no causal language model; for bert that is BertLMHeadModel",
    ),
    "encoder as a decoder": (
        lambda: transformers.BertConfig(architectures=["BertLMHeadModel"]),
        "BertLMHeadModel has the layers of an encoder",
    ),
    "vision": (
        lambda: transformers.ViTConfig(architectures=["ViTForImageClassification"]),
        "ViTForImageClassification is no causal language model of transformers",
    ),
    "vision and text": (
        lambda: transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]),
        "Gemma3ForConditionalGeneration is not about text alone (vision_config)",
    ),
    "state space": (transformers.MambaConfig, "MambaForCausalLM has layers with a state"),
    "hybrid": (transformers.Qwen3NextConfig, "Qwen3NextForCausalLM has layers with a state"),
    "linear attention": (
        lambda: transformers.MiniMaxConfig(
            num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]
        ),
        "MiniMaxForCausalLM has layers of linear_attention",
    ),
    "chunked attention": (
        transformers.Llama4TextConfig,
        "Llama4ForCausalLM has layers of chunked_attention",
    ),
    "latent attention": (
        transformers.DeepseekV3Config,
        "DeepseekV3ForCausalLM has latent attention (MLA)",
    ),
    "sinks": (transformers.GptOssConfig, "GptOssForCausalLM has attention sinks"),
    "ALiBi": (transformers.BloomConfig, "BloomForCausalLM has ALiBi"),
    "ALiBi of MPT": (transformers.MptConfig, "MptForCausalLM has ALiBi"),
    "ALiBi of Falcon": (
        lambda: transformers.FalconConfig(alibi=True),
        "FalconForCausalLM has ALiBi",
    ),
    "no interface": (
        transformers.GPTJConfig,
        "GPTJForCausalLM has attention that does not go through transformers' interface",
    ),
    "a rank for each layer": (
        lambda: transformers.LlamaConfig(
            num_hidden_layers=2,
            per_layer_config={layer: {"kv_lora_rank": 8 + layer} for layer in range(2)},
        ),
        "LlamaForCausalLM has a kv_lora_rank for each layer",
    ),
    "shared keys": (
        lambda: transformers.Gemma3nTextConfig(),
        "Gemma3nForCausalLM has layers that share keys and values",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_the_paged_cache_cannot_serve_is_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    make, problem = UNSUPPORTED[kind]
    make().save_pretrained(tmp_path)
    assert problem in refuse_open(tmp_path, load_format="dummy")


@pytest.mark.parametrize("kind", ["GPTNeoX", "OPT", "Qwen3Moe", "Gemma3Text", "Starcoder2"])
def test_a_model_whose_attention_is_plain_is_not_refused(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    module_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    refuse_unsupported(config, module_class)


@pytest.mark.parametrize("kinds", [["attention"] * 2, ["mamba", "attention"]])
def test_a_hybrid_without_a_layer_that_has_a_state_is_not_refused(kinds: list[str]) -> None:
    config = transformers.GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=kinds)
    refused = pytest.raises(InvalidConfig, match="has layers with a state")
    with refused if "mamba" in kinds else nullcontext():
        refuse_unsupported(config, transformers.GraniteMoeHybridForCausalLM)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(checkpoint_folder: Path, name: str) -> None:
    (checkpoint_folder / "model.safetensors").rename(checkpoint_folder / name)
    assert f"has its weights in {name}, a pickle, which could run any code" in refuse_open(
        checkpoint_folder
    )


def test_a_folder_without_weights_is_refused_with_what_needs_none(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "model.safetensors").unlink()
    assert "or give --load-format dummy for random ones" in refuse_open(checkpoint_folder)
    assert open_folder(checkpoint_folder, load_format="dummy").vocab_size == SMALL["vocab_size"]


@pytest.mark.parametrize("kept", [0, 7, 100, 10_000, -1])
def test_a_file_that_was_cut_short_is_refused_by_name(checkpoint_folder: Path, kept: int) -> None:
    file = checkpoint_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} is cut short or damaged: " in refuse_open(checkpoint_folder)


def test_a_file_of_anything_else_is_refused_by_name(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    file.write_bytes(b"\xff" * 5000)
    assert f"{file} is cut short or damaged: " in refuse_open(checkpoint_folder)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    create_module("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
    missing = weight_files(tmp_path)[1]
    missing.unlink()
    assert f"has no {missing.name}, which model.safetensors.index.json names" in refuse_open(
        tmp_path
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", ".."])
def test_an_index_that_names_other_files_is_refused(checkpoint_folder: Path, name: str) -> None:
    (checkpoint_folder / "model.safetensors").unlink()
    change_json(
        checkpoint_folder, "model.safetensors.index.json", weight_map={"lm_head.weight": name}
    )
    assert f"names '{name}', not a safetensors file of its folder" in refuse_open(checkpoint_folder)


def test_weights_of_another_shape_are_refused_by_name(checkpoint_folder: Path) -> None:
    change_json(checkpoint_folder, "config.json", intermediate_size=100)
    line = refuse_load(checkpoint_folder)
    assert "mlp.down_proj.weight is 64x96, not 64x100" in line
    assert re.search(r" and \d+ more\. Take both from one model$", line)


def test_weights_that_are_missing_are_refused_by_name(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "lacks weights of LlamaForCausalLM: model.layers.1.mlp.up_proj.w" in refuse_load(
        checkpoint_folder
    )


def add_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Add tensors to the folder's file, or replace those of the same names."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.embed_tokens.weight",
        "vision_tower.encoder.layers.0.weight",
        "model.layers.3.mlp.up_proj.weight",
    ],
)
def test_weights_that_no_causal_model_computes_with_are_left_alone(
    checkpoint_folder: Path, checkpoints: Path, name: str
) -> None:
    """A layer after the last predicts further tokens, if the configuration counts such layers."""
    add_tensors(checkpoint_folder, {name: torch.zeros(3)})
    change_json(checkpoint_folder, "config.json", num_nextn_predict_layers=1)
    assert torch.equal(
        logits(load_folder(checkpoint_folder)), logits(load_folder(checkpoints / "llama"))
    )


def test_a_causal_mask_is_no_bias_of_attention(checkpoint_folder: Path) -> None:
    name = "model.layers.0.attn.bias"
    add_tensors(checkpoint_folder, {name: torch.ones(1, 1, 8, 8)})
    assert load_folder(checkpoint_folder) is not None
    add_tensors(checkpoint_folder, {name: torch.ones(8)})
    assert f"does not use: {name}. Take" in refuse_load(checkpoint_folder)


def test_weights_that_the_configuration_does_not_use_are_refused_by_name(
    checkpoint_folder: Path,
) -> None:
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in (3, 4, 5, 6)]
    add_tensors(checkpoint_folder, {name: torch.ones(64) for name in names})
    assert (
        f"LlamaForCausalLM with its config.json does not use: {', '.join(names[:3])} and 1 more. "
        "Take both from one model, or remove these weights"
    ) in refuse_load(checkpoint_folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64, dtype=torch.float8_e4m3fn)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64, dtype=torch.int8)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1)),
        ("model.layers.0.mlp.up_proj.scales", torch.ones(96)),
        ("model.layers.0.mlp.up_proj.qweight", torch.zeros(8, dtype=torch.int32)),
    ],
)
def test_quantised_weights_without_a_quantization_config_are_refused_by_name(
    checkpoint_folder: Path, name: str, tensor: Any
) -> None:
    add_tensors(checkpoint_folder, {name: tensor})
    line = refuse_load(checkpoint_folder)
    assert f"has quantised weights ({name}" in line
    assert line.endswith("no quantization_config. Serve the checkpoint that it was made from")


def test_names_of_a_wrapped_module_are_refused_with_the_names_that_the_files_have(
    checkpoint_folder: Path,
) -> None:
    """As saved by DistributedDataParallel or by torch.compile."""
    file = checkpoint_folder / "model.safetensors"
    tensors = {f"module.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    refusal = refuse_load(checkpoint_folder)
    assert "lacks weights of LlamaForCausalLM: lm_head.weight, model.embed_tokens" in refusal
    assert "It has module.lm_head.weight, module.model.embed_tokens.weight" in refusal
    assert "save it by the names of LlamaForCausalLM" in refusal


def test_a_missing_head_is_refused_with_the_field_that_ties_it(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert (
        "lacks weights of LlamaForCausalLM: lm_head.weight. Set tie_word_embeddings to true in "
        "config.json if the head is the embedding, or fetch it again"
    ) in refuse_load(checkpoint_folder)


def test_an_adapter_beside_the_weights_is_not_read_and_that_is_said(
    checkpoint_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint_folder / "adapter_config.json").write_text("{}")
    open_folder(checkpoint_folder)
    assert "adapter_config.json is not read: the model is served without" in caplog.text


def test_two_names_of_one_weight_are_refused(checkpoint_folder: Path) -> None:
    add_tensors(checkpoint_folder, {"norm.weight": torch.ones(64)})
    assert "norm.weight, which are one weight. Remove one of them" in refuse_load(checkpoint_folder)


def test_a_shard_with_a_tensor_that_the_index_gives_to_another_is_refused(tmp_path: Path) -> None:
    create_module("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
    first, second, *_ = weight_files(tmp_path)
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: torch.zeros(3)}, second, metadata={"format": "pt"})
    assert (
        f"{second} has {name}, which model.safetensors.index.json gives to {first.name}. Fetch all"
    ) in refuse_open(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer and"),
        (b"\n<!DOCTYPE html><html>", "is a page of HTML or XML"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_text_in_the_place_of_a_file_is_named(
    checkpoint_folder: Path, name: str, content: bytes, problem: str
) -> None:
    (checkpoint_folder / name).write_bytes(content * 50)
    assert f"{checkpoint_folder / name} {problem}" in refuse_open(checkpoint_folder)


def test_a_tokenizer_that_is_a_git_lfs_pointer_is_named(checkpoint_folder: Path) -> None:
    path = checkpoint_folder / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert f"{path} is a git-lfs pointer and not the file. Run" in refuse_open(checkpoint_folder)


def test_a_config_with_a_byte_order_mark_is_refused_by_it(checkpoint_folder: Path) -> None:
    path = checkpoint_folder / "config.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert "begins with a byte order mark. Save it as UTF-8 without one" in refuse_open(
        checkpoint_folder
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("target", ["gone", None])
def test_a_link_that_leads_to_no_file_is_named(
    checkpoint_folder: Path, name: str, target: str | None
) -> None:
    """As in a cache that was damaged. None: the link leads to itself."""
    path = checkpoint_folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(target or name)
    assert f"{path} is a symbolic link that leads to no file. Fetch it again" in refuse_open(
        checkpoint_folder
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model-Q4_K_M.gguf", "its model-Q4_K_M.gguf is a GGUF file, which is not served"),
        ("consolidated.safetensors", "is the format of Mistral's own library, which is not serv"),
        ("adapter_model.safetensors", "is an adapter and not a model"),
    ],
)
def test_weights_of_another_format_are_named(
    checkpoint_folder: Path, name: str, problem: str
) -> None:
    (checkpoint_folder / "model.safetensors").rename(checkpoint_folder / name)
    assert problem in refuse_open(checkpoint_folder)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_act": "swoosh"}, "config.json has hidden_act 'swoosh', which transformers "),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "config.json has rope_parameters.rope_type 'spiral', which transformers ",
        ),
    ],
)
def test_a_function_that_transformers_does_not_know_is_refused_by_its_field(
    checkpoint_folder: Path, fields: dict[str, Any], problem: str
) -> None:
    change_json(checkpoint_folder, "config.json", **fields)
    assert problem in refuse_load(checkpoint_folder)


def test_numbers_of_a_config_that_make_no_module_are_refused(checkpoint_folder: Path) -> None:
    change_json(checkpoint_folder, "config.json", pad_token_id=10**6)
    assert "LlamaForCausalLM cannot be made of config.json: " in refuse_load(checkpoint_folder)


def test_weights_that_no_memory_could_hold_are_refused_with_their_size(
    checkpoint_folder: Path,
) -> None:
    """2**24 rows of 2**16 numbers are 4096 GiB. Nothing is allocated for them."""
    change_json(checkpoint_folder, "config.json", vocab_size=2**24, hidden_size=2**16)
    with pytest.raises(
        InvalidConfig, match=r"^model: its weights take 8\d\d\d\.\d GiB, and cpu has"
    ):
        load_folder(checkpoint_folder, "dummy")


def test_loading_says_nothing(checkpoint_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal.

    forge refuses what transformers warns of, or it is harmless.
    """
    file = checkpoint_folder / "model.safetensors"
    save_file({**load_file(file), "mtp.other": torch.zeros(3)}, file, metadata={"format": "pt"})
    load_folder(checkpoint_folder)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()
