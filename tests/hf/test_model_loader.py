"""A start: which decoder, which geometry, how many blocks, and that all memory is freed."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge import LLM, SamplingParams  # noqa: E402
from forge.config import DeviceOptions  # noqa: E402
from forge.errors import EngineDead, InvalidConfig  # noqa: E402
from forge.models.hf.decoders.comparison import max_logits_error  # noqa: E402
from forge.models.hf.decoders.fused_decoder import FusedDecoder  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    ModuleDecoder,
    register_attention,
)
from forge.models.hf.kv_cache import KVCacheSpec  # noqa: E402
from forge.models.hf.loading.decoder_loader import run_concurrently, select_decoder  # noqa: E402
from forge.models.hf.loading.end_tokens import (  # noqa: E402
    DEFAULT_SUFFIX,
    EndToken,
    complete_end_tokens,
)
from forge.models.hf.loading.kernel_selection import refuse_small_gpu  # noqa: E402
from forge.models.hf.loading.memory import num_device_blocks, num_host_blocks  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.models.hf.loading.model_spec import (  # noqa: E402
    CPU_DEFAULTS,
    CUDA_DEFAULTS,
    refuse_dynamic_rope,
)
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.hf.tokenizer import HFTokenizer  # noqa: E402
from forge.models.loader import load_model  # noqa: E402
from tests.hf.families import FAMILIES, SMALL, create_module, generate_greedy  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch
FUSABLE = {"llama", "qwen2", "qwen3", "mistral", "phi3"}


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return save_checkpoint(tmp_path_factory.mktemp("saved"))


# Which decoder.


class DoublingOps(TorchOps):
    """Operations with a fault: the gate is doubled."""

    def gate_up(self, x: Any, w: Any) -> Any:
        return 2 * super().gate_up(x, w)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_decoder_is_taken_where_the_structure_is_known(family: str) -> None:
    decoder, layers = select_decoder(
        create_module(family, torch.float64, ATTENTION_NAME), TorchOps(), 64
    )
    assert type(decoder) is (FusedDecoder if family in FUSABLE else ModuleDecoder)
    assert len(layers) == 3


def test_a_fused_decoder_that_computes_something_else_is_not_taken_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = create_module("llama", torch.float64, ATTENTION_NAME)
    decoder, _ = select_decoder(module, DoublingOps(), 64)
    assert type(decoder) is ModuleDecoder
    (record,) = caplog.records
    assert "the modules; they are used instead" in record.getMessage()


def test_the_tolerance_grows_with_the_rounding_of_the_dtype() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert [max_logits_error(dtype) for dtype in dtypes] == [1e-5, 1e-3, 0.1, 0.1]


# Rotations that change with the batch.


def rope_config(**rope: Any) -> Any:
    return hf.Phi3Config(
        **SMALL, original_max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope}
    )


DYNAMIC_ROPE_CONFIGS = {
    "dynamic": hf.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "dynamic",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        },
    ),
    "longrope": rope_config(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8),
}


@pytest.mark.parametrize("kind", DYNAMIC_ROPE_CONFIGS)
def test_a_rotation_that_changes_with_the_batch_is_served_only_where_it_does_not(kind: str) -> None:
    refuse_dynamic_rope(DYNAMIC_ROPE_CONFIGS[kind], 128)
    with pytest.raises(InvalidConfig, match=f"beyond 128 positions {kind}.*Give at most 128") as e:
        refuse_dynamic_rope(DYNAMIC_ROPE_CONFIGS[kind], 129)
    assert e.value.option == "max_model_len"


def test_a_rotation_that_stays_is_served_at_any_length() -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    yarn = {**linear, "rope_type": "yarn", "original_max_position_embeddings": 128}
    for rope in (linear, yarn, {"rope_type": "default", "rope_theta": 1e4}):
        refuse_dynamic_rope(hf.LlamaConfig(**SMALL, rope_parameters=rope), 2048)
    refuse_dynamic_rope(hf.GPT2Config(), 1024)


def test_one_layer_kind_that_changes_is_enough_to_refuse() -> None:
    config = hf.Gemma3TextConfig(**SMALL)
    changing = {"rope_type": "dynamic", "original_max_position_embeddings": 64}
    config.rope_parameters = {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": changing,
    }
    with pytest.raises(InvalidConfig, match="beyond 64 positions"):
        refuse_dynamic_rope(config, 65)


# What the log of a start says.


def copy_with(folder: Path, name: str, target: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint with other fields in a JSON file."""
    shutil.copytree(folder, target)
    path = target / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))
    return target


@pytest.mark.parametrize("start", ["first", "from the record"])
def test_a_start_logs_which_tokens_end_an_output_and_what_names_them(
    start: str, checkpoint: Path, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's own is `<|end|>`, 2. An id beyond the vocabulary is named too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = copy_with(checkpoint, "config.json", tmp_path / "copy", eos_token_id=9999)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    for _ in range(1 if start == "first" else 2):
        caplog.clear()
        config = open_config(folder, {"num_blocks": 4})
    assert config.end_ids == (2,)
    lines = [record.getMessage() for record in caplog.records if "output" in record.getMessage()]
    ends, beyond = lines
    assert ends.startswith("tokens that end an output: 5 ")
    assert ends.endswith(
        " (generation_config.json), 2 '<|end|>' (generation_config.json, the tokenizer)"
    )
    assert beyond == "eos_token_id 9999 (config.json) ends no output: the vocabulary has 307 tokens"


def test_the_default_of_a_class_ends_an_output_where_it_is_a_special_token(
    checkpoint: Path,
) -> None:
    """LlamaConfig's is 2: the end of Llama 2, and `#` in the vocabulary of Llama 3."""
    tokenizer = HFTokenizer.from_folder(checkpoint)  # 2 is special, and its own end
    special, word = (
        EndToken(token, ("LlamaConfig" + DEFAULT_SUFFIX,))
        for token in (tokenizer.eos_token, tokenizer.encode("#")[0])
    )
    named = EndToken(5, ("config.json",))
    both = EndToken(word.token, (*named.origins, *word.origins))
    own = EndToken(2, ("the tokenizer",))
    merged = EndToken(2, (*special.origins, *own.origins))
    assert complete_end_tokens([named, special], tokenizer) == (named, merged)
    assert complete_end_tokens([named, word], tokenizer) == (named, own)
    assert complete_end_tokens([both], tokenizer) == (both, own)


def test_a_start_logs_a_chat_template_that_renders_no_message(
    checkpoint: Path, tmp_path: Path, caplog: Any
) -> None:
    folder = copy_with(checkpoint, "tokenizer_config.json", tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")
    open_config(folder, {"num_blocks": 4})
    assert "chats will be refused: messages: the model's chat template refuses them" in caplog.text


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_start_logs_that_modules_compute_the_layers(family: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    select_decoder(create_module(family, torch.float32, ATTENTION_NAME), TorchOps(), 64)
    assert ("runs transformers' modules" in caplog.text) == (family not in FUSABLE)


# Geometry.


def open_config(folder: Path, geometry: dict[str, Any], **options: Any) -> Any:
    """Return the completed geometry."""
    with open_model(str(folder), geometry, DeviceOptions(device="cpu", **options)) as loaded:
        return loaded.config


def test_options_that_are_not_given_are_the_devices_or_the_checkpoints(checkpoint: Path) -> None:
    config = open_config(checkpoint, {})
    assert {name: getattr(config, name) for name in CPU_DEFAULTS} == CPU_DEFAULTS
    assert config.max_model_len == 2048
    assert config.num_blocks == 64 * 2048 // 16, "every slot can be full"
    assert config.end_ids == ()
    assert str(checkpoint) in config.cache_namespace and "float32" in config.cache_namespace


def test_options_that_are_given_are_kept(checkpoint: Path) -> None:
    given = {
        "num_blocks": 7,
        "block_size": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 11,
        "max_model_len": 40,
        "depth": 2,
    }
    config = open_config(checkpoint, given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize(("rows", "tokens"), [(1024, 2048), (2048, 4096), (3000, 6000)])
def test_a_full_batch_of_decodes_leaves_tokens_to_prompts(
    checkpoint: Path, rows: int, tokens: int
) -> None:
    config = open_config(checkpoint, {"max_num_seqs": rows, "num_blocks": 4, "max_model_len": 32})
    assert config.max_num_batched_tokens == tokens


def test_a_number_of_rows_that_is_no_integer_is_named(checkpoint: Path) -> None:
    with pytest.raises(InvalidConfig, match="max_num_seqs: 'many' is not a positive integer"):
        open_config(checkpoint, {"max_num_seqs": "many"})


def test_another_dtype_is_another_namespace_of_the_cache(checkpoint: Path) -> None:
    given = {"num_blocks": 4}
    one, two = (
        open_config(checkpoint, given, dtype=name).cache_namespace
        for name in ("float32", "float64")
    )
    assert one != two


def test_a_gpu_plans_ahead_in_larger_blocks() -> None:
    assert CUDA_DEFAULTS["depth"] == 2 and CPU_DEFAULTS["depth"] == 1
    assert CUDA_DEFAULTS["block_size"] % CPU_DEFAULTS["block_size"] == 0
    assert CUDA_DEFAULTS.keys() == CPU_DEFAULTS.keys()


def test_a_cache_on_the_host_is_what_is_wanted_or_a_share_of_the_free_memory() -> None:
    small = KVCacheSpec(1, 1, 64, torch.float32)
    assert num_host_blocks(small.bytes_per_token, 16, 10) == 10
    huge = KVCacheSpec(1000, 1000, 1000, torch.float64)
    assert num_host_blocks(huge.bytes_per_token, 4096, 10) == 1
    many = num_host_blocks(small.bytes_per_token, 16, 2**40)
    assert 1 < many < 2**40
    assert num_host_blocks(small.bytes_per_token, 32, 2**40) == pytest.approx(many / 2, rel=0.1)


# All of it.


def test_a_folder_is_served_and_closed(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(str(checkpoint), dtype="float64", device="cpu", num_blocks=32)
    (out,) = llm.generate(["Once upon a time"], params)
    module = hf.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    assert out.token_ids == generate_greedy(module, out.prompt_token_ids, 12)
    fast = hf.AutoTokenizer.from_pretrained(checkpoint)
    assert out.text == fast.decode(out.token_ids, skip_special_tokens=True)
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate(["a"], params)


def test_random_weights_serve_a_folder_without_any(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), load_format="dummy", device="cpu", num_blocks=8) as llm:
        assert len(llm.generate(["a"], params)[0].token_ids) == 4


def test_nothing_holds_the_model_when_the_context_is_over(checkpoint: Path) -> None:
    given = {"num_blocks": 8, "device": "cpu"}
    with load_model(str(checkpoint), given) as loaded:
        held = weakref.ref(loaded.model)
    del loaded
    gc.collect()
    assert held() is None


# A share of a GPU's memory.


TOTAL_BYTES = 140 * 2**30
"""Memory of the GPU in tests of its share. A tenth of it is in use."""


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    memory = (TOTAL_BYTES * 9 // 10, TOTAL_BYTES)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: memory)
    return torch.device("cuda")


def test_blocks_of_a_gpu_fill_what_is_left_of_the_share_and_no_more(
    gpu_memory: torch.device,
) -> None:
    size = KVCacheSpec(8, 4, 128, torch.bfloat16).bytes_per_token
    fits = {"block_size": 64, "max_model_len": 64, "device": gpu_memory}
    few, many = (num_device_blocks(size, 0, utilization=share, **fits) for share in (0.5, 0.75))
    assert (many - few) * size * 64 == pytest.approx(TOTAL_BYTES / 4, rel=0.01)


def test_where_the_longest_sequence_does_not_fit_what_would_fit_is_said(
    gpu_memory: torch.device,
) -> None:
    size = KVCacheSpec(8, 4, 128, torch.bfloat16).bytes_per_token
    fits = {"block_size": 64, "device": gpu_memory}
    half = TOTAL_BYTES // 2 // size
    with pytest.raises(InvalidConfig, match=r"0\.1 is too little.*Give 0\.\d\d") as refused:
        num_device_blocks(size, 0, max_model_len=half, utilization=0.1, **fits)
    assert refused.value.option == "gpu_memory_utilization"
    share = float(str(refused.value).split("Give ")[1])
    assert num_device_blocks(size, 0, max_model_len=half, utilization=share, **fits) * 64 >= half
    with pytest.raises(InvalidConfig, match="Give ") as refused:
        num_device_blocks(size, 0, max_model_len=4 * half, utilization=0.9, **fits)
    assert refused.value.option == "max_model_len"
    longest = int(str(refused.value).split("Give ")[1])
    blocks = num_device_blocks(size, 0, max_model_len=longest, utilization=0.9, **fits)
    assert blocks * 64 == longest


# On a GPU.


@pytest.mark.gpu
@pytest.mark.timeout(600)  # FlashInfer compiles its kernels at their first use
def test_a_folder_is_served_from_a_gpu_and_its_memory_given_back(checkpoint: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"dtype": "bfloat16", "device": "cuda", "num_blocks": 64, "max_num_seqs": 8}
    for _ in range(2):
        with LLM(str(checkpoint), **options) as llm:
            assert len(llm.generate(["Once upon a time"], params)[0].token_ids) == 12
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    # Libraries keep some memory, no model's: the KV cache alone would be twice as much.
    assert torch.cuda.memory_allocated() - before < 2**28 + 2**26


def test_a_thread_that_compiles_is_started_before_its_first_call() -> None:
    started: set[int] = set()

    def check() -> None:
        assert threading.get_ident() in started

    run_concurrently([check] * 20, start_thread=lambda: started.add(threading.get_ident()))
    assert started


@pytest.mark.parametrize(
    ("capability", "shared_kib", "dtype", "is_refused"),
    [
        ((9, 0), 227, torch.bfloat16, False),
        ((10, 0), 227, torch.float16, False),
        ((8, 0), 163, torch.bfloat16, True),
        ((12, 0), 99, torch.bfloat16, True),
        ((8, 0), 163, torch.float32, False),
    ],
)
def test_a_gpu_that_cannot_run_the_kernels_is_refused(
    capability: tuple[int, int],
    shared_kib: int,
    dtype: Any,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Triton's compiler would end the start later, with pages of PTX. float32 has no kernels."""
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        shared_memory_per_block_optin=shared_kib * 1024,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    context = pytest.raises(InvalidConfig, match=r"need 9\.0 and 227 KiB")
    with context if is_refused else nullcontext():
        refuse_small_gpu(torch.device("cuda"), dtype)
