"""A record of an earlier start gives the decoder that was compared, to the last bit, or nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge import LLM, SamplingParams  # noqa: E402
from forge.config import DeviceOptions  # noqa: E402
from forge.models.hf.decoders.fused_decoder import FusedDecoder  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    register_attention,
)
from forge.models.hf.loading import decoder_record  # noqa: E402
from forge.models.hf.loading.checkpoint import load_module, open_checkpoint  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.decoder_record import (  # noqa: E402
    DecoderRecord,
    RecordKey,
    decode_record,
    encode_record,
    library_versions,
    may_write_record,
    read_record,
    record_key,
    write_record,
)
from forge.models.hf.loading.end_tokens import EndToken  # noqa: E402
from forge.models.hf.loading.model_loader import open_inspected  # noqa: E402
from forge.models.hf.loading.recorded_decoder import (  # noqa: E402
    create_record,
    open_reader,
    recorded_tensors,
)
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.hf.tokenizer import HFTokenizer  # noqa: E402
from forge.start_log import StartLog  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
FUSABLE = ("llama", "qwen2", "qwen3", "mistral", "phi3")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints by family, which tests only read."""
    root = tmp_path_factory.mktemp("families")
    for family in (*FUSABLE, "gemma2"):
        save_checkpoint(root / family, family)
    return root


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change. Its files are as old as those that it is copied from."""
    return Path(shutil.copytree(checkpoints / "qwen3", tmp_path / "qwen3"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forge" / "decoders"


def fused_decoder(folder: Path, load_format: str, dtype: str) -> tuple[Any, FusedDecoder, Any]:
    """Return the module of a folder, its fused decoder, and the layers."""
    register_attention()
    checkpoint = open_checkpoint(str(folder), CPU, dtype, load_format)
    module = load_module(checkpoint, CPU, load_format, ATTENTION_NAME)
    with torch.inference_mode():
        decoder, layers = select_decoder(module, TorchOps(), 64)
    assert isinstance(decoder, FusedDecoder)
    return module, decoder, layers


def record_of(
    folder: Path, load_format: str = "auto", dtype: str = "float32"
) -> tuple[DecoderRecord | None, FusedDecoder]:
    module, fused, layers = fused_decoder(folder, load_format, dtype)
    return record_fused(module, fused, layers, folder, load_format), fused


def record_fused(
    module: Any, fused: FusedDecoder, layers: Any, folder: Path, load_format: str = "auto"
) -> DecoderRecord | None:
    return create_record(
        module,
        fused,
        layers,
        folder,
        load_format,
        ends=(EndToken(2, ("config.json",)),),
        vocab_size=307,
        tokenizer_class="PreTrainedTokenizerFast",
    )


def key_of(folder: Path, **changes: Any) -> RecordKey:
    options = {"dtype": "auto", "load_format": "auto", "max_model_len": None}
    return record_key(folder, CPU, **{**options, "versions": library_versions(), **changes})


# What a record gives.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", FUSABLE)
def test_every_tensor_of_a_recorded_decoder_has_the_bits_of_the_compared_one(
    checkpoints: Path, family: str, load_format: str, dtype: str
) -> None:
    record, fused = record_of(checkpoints / family, load_format, dtype)
    assert record is not None
    record = decode_record(encode_record(record))
    assert record is not None
    with open_reader(record, checkpoints / family, load_format, CPU) as reader:
        tensors = list(recorded_tensors(record, reader, CPU, lambda count: None))
    rebuilt = FusedDecoder.from_tensors(
        TorchOps(), record.layers[0], record.eps, len(record.layers), tensors
    )
    assert rebuilt.eps == fused.eps and rebuilt.dtype == fused.dtype
    for ours, theirs in zip(rebuilt.tensors(), fused.tensors(), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_a_record_is_read_as_it_was_written(checkpoints: Path) -> None:
    record, _ = record_of(checkpoints / "llama")
    assert record is not None and decode_record(encode_record(record)) == record
    assert decode_record(encode_record(None)) is None


@pytest.mark.parametrize("index", [0, 1, 4, -1])
def test_a_decoder_with_one_other_bit_has_no_record(checkpoints: Path, index: int) -> None:
    """The tensors: embedding, cosines, the first layer's QKV, head."""
    module, fused, layers = fused_decoder(checkpoints / "llama", "auto", "float32")
    tensor = list(fused.tensors())[index]
    assert tensor is not None
    with torch.inference_mode():
        tensor.view(torch.int32)[-1, -1] ^= 1
    assert record_fused(module, fused, layers, checkpoints / "llama") is None


def test_weights_that_the_files_have_under_other_names_have_no_record(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    module, fused, layers = fused_decoder(folder, "auto", "float32")
    weights = load_file(folder / "model.safetensors")
    renamed = {f"other.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    assert record_fused(module, fused, layers, folder) is None


@pytest.mark.parametrize("change", ["other shapes", "cut short", "removed"])
def test_weights_that_cannot_be_read_again_have_no_record(folder: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    module, fused, layers = fused_decoder(folder, "auto", "float32")
    path = folder / "model.safetensors"
    if change == "other shapes":
        name = "model.layers.0.self_attn.k_proj.weight"
        weights = load_file(path)
        save_file({**weights, name: weights[name][:, :1].contiguous()}, path)
    elif change == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert record_fused(module, fused, layers, folder) is None


# What a record depends on.


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"load_format": "dummy"},
        {"max_model_len": 32},
        {"versions": {**library_versions(), "torch": "2.0.0"}},
        {"versions": {**library_versions(), "transformers": "5.0.0"}},
    ],
)
def test_other_options_and_versions_are_another_key(
    checkpoints: Path, changes: dict[str, Any]
) -> None:
    assert key_of(checkpoints / "qwen3", **changes) != key_of(checkpoints / "qwen3")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_another_description_is_another_key(folder: Path, name: str) -> None:
    before = key_of(folder)
    fields = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**fields, "model_max_length": 99}))
    assert key_of(folder) != before


def test_weights_that_were_written_again_are_another_key(folder: Path) -> None:
    before = key_of(folder)
    path = folder / "model.safetensors"
    assert key_of(folder) == before
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert key_of(folder) != before
    assert key_of(folder, load_format="dummy") == key_of(folder, load_format="dummy")


def test_weights_of_another_size_are_another_key(folder: Path) -> None:
    before, path = key_of(folder), folder / "model.safetensors"
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert key_of(folder) != before


def test_weights_under_other_names_in_a_file_of_equal_size_and_time_are_another_key(
    folder: Path,
) -> None:
    before, path = key_of(folder), folder / "model.safetensors"
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"model.norm.weight", b"model.morn.weight"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size and path.read_bytes() != content
    assert key_of(folder) != before


def test_every_file_that_an_index_may_name_is_in_the_key(folder: Path) -> None:
    path = (folder / "model.safetensors").rename(folder / "shard-1.safetensors")
    before = key_of(folder)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert key_of(folder) != before


def test_files_may_have_names_that_are_no_text(folder: Path) -> None:
    before = key_of(folder)
    for suffix in (".json", ".safetensors"):
        (folder / f"caf\udce9{suffix}").write_bytes(b"{}")
    assert key_of(folder) != before


def test_variables_that_choose_a_compiler_are_another_key(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of(checkpoints / "qwen3")
    monkeypatch.setenv("HOLIDAY", "1")
    assert key_of(checkpoints / "qwen3") == before
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert key_of(checkpoints / "qwen3") != before


@pytest.mark.parametrize("name", ["decoders/fused_decoder.py", "ops/skinny_gemm.cu"])
def test_another_decoder_or_kernel_is_another_key(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    sources = Path(shutil.copytree(decoder_record.SOURCES, tmp_path / "hf"))
    before = key_of(checkpoints / "qwen3", sources=sources)
    assert before == key_of(checkpoints / "qwen3")
    (sources / name).write_text((sources / name).read_text() + "\n")
    assert key_of(checkpoints / "qwen3", sources=sources) != before


def test_a_record_is_not_used_once_transformers_files_have_changed(
    checkpoints: Path, cache: Path
) -> None:
    record, _ = record_of(checkpoints / "qwen3")
    assert record is not None
    assert {"models/qwen3/modeling_qwen3.py", "configuration_utils.py"} <= record.sources.keys()
    assert all(record.sources.values())
    key = key_of(checkpoints / "qwen3")
    write_record(key, record)
    assert read_record(key) == record
    changed = {**record.sources, "models/qwen3/modeling_qwen3.py": "00"}
    write_record(key, record._replace(sources=changed))
    assert read_record(key) is None and may_write_record(key)
    write_record(key, record)
    assert read_record(key) == record and not may_write_record(key)


def test_a_checkpoint_without_a_record_is_not_tried_again(checkpoints: Path, cache: Path) -> None:
    key = key_of(checkpoints / "qwen3")
    assert may_write_record(key)
    write_record(key, None)
    assert not may_write_record(key) and read_record(key) is None


def test_no_record_is_made_for_a_folder_without_room_for_files(
    cache: Path, checkpoints: Path
) -> None:
    """/proc accepts no files, not even those of root."""
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/proc/self/task")
    assert not may_write_record(key_of(checkpoints / "qwen3"))


def test_the_oldest_records_are_removed(cache: Path) -> None:
    for index in range(decoder_record.MAX_RECORDS + 3):
        write_record((b"%d" % index,), None)
        (newest,) = (path for path in cache.iterdir() if path.stat().st_mtime_ns > index + 1)
        os.utime(newest, ns=(index + 1, index + 1))
    assert len(list(cache.iterdir())) == decoder_record.MAX_RECORDS
    assert may_write_record((b"0",)) and not may_write_record((b"3",))


# Starts.


def test_the_users_records_are_not_those_of_tests() -> None:
    folder = decoder_record.cache_folder("decoders")
    assert folder is not None and not folder.is_relative_to(Path.home() / ".cache")


def load_inspected(folder: Path, key: RecordKey | None) -> None:
    """Load a model, after its key was found."""
    options, start = DeviceOptions(device="cpu"), StartLog()
    open_inspected(str(folder), {}, options, CPU, start, key).load()


def test_files_that_change_while_a_model_is_opened_are_not_recorded(
    folder: Path, cache: Path
) -> None:
    before = key_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    load_inspected(folder, before)
    assert read_record(before) is None and read_record(key_of(folder)) is None
    load_inspected(folder, key_of(folder))
    assert read_record(before) is None and read_record(key_of(folder)) is not None


def test_a_start_that_fetches_the_weights_is_recorded_with_them(folder: Path, cache: Path) -> None:
    """Another folder with this description and without weights has no record."""
    aside = (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    before = key_of(folder)
    aside.rename(folder / "model.safetensors")
    load_inspected(folder, before)
    assert read_record(before) is None and read_record(key_of(folder)) is not None


def start_and_generate(
    folder: Path, caplog: pytest.LogCaptureFixture, **options: Any
) -> tuple[str, list[int]]:
    """Return the log of a start, and the tokens after a prompt."""
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "forge.start"),
        LLM(str(folder), device="cpu", num_blocks=32, **options) as llm,
    ):
        tokens = llm.generate(["Once upon a time"], GREEDY)[0].token_ids
    return caplog.text, list(tokens)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_second_start_uses_the_record_and_continues_alike(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    first_log, first = start_and_generate(folder, caplog, load_format=load_format)
    second_log, second = start_and_generate(folder, caplog, load_format=load_format)
    assert first == second and len(first) == 12
    phase = "initializing weights: " if load_format == "dummy" else "loading weights: "
    assert phase in first_log and phase in second_log
    # The record is used: with another end token in it, the next start ends there.
    key = key_of(folder, load_format=load_format)
    record = read_record(key)
    assert record is not None
    write_record(key, record._replace(ends=[EndToken(first[0], ("config.json",))]))
    assert len(start_and_generate(folder, caplog, load_format=load_format)[1]) == 1


def test_a_start_with_a_record_imports_no_modelling_code(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, tokens = start_and_generate(folder, caplog)
    program = f"""
import sys
from forge import LLM, SamplingParams
with LLM({str(folder)!r}, device="cpu", num_blocks=32) as llm:
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
names = ("transformers", "transformers.modeling_utils", "torch._dynamo", "sympy")
print(list(outputs[0].token_ids), [name for name in names if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.stdout == f"{tokens} ['transformers']\n", done.stderr


def test_a_model_that_keeps_its_modules_has_no_record(
    checkpoints: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = start_and_generate(checkpoints / "gemma2", caplog)
    assert not list(cache.iterdir())
    assert start_and_generate(checkpoints / "gemma2", caplog)[1] == first


def test_weights_that_change_between_two_starts_are_the_ones_that_serve(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    start_and_generate(folder, caplog)
    weights = load_file(folder / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[head] = weights[head].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _, changed = start_and_generate(folder, caplog)
    shutil.rmtree(cache)
    assert start_and_generate(folder, caplog)[1] == changed


# The tokenizer.


def test_a_tokenizer_that_its_class_alone_loads_is_equal(folder: Path) -> None:
    tokenizer = HFTokenizer.from_folder(folder, (2,))
    assert tokenizer.equals_its_class(folder)
    alone = HFTokenizer.from_folder(folder, (2,), tokenizer.class_name)
    assert alone.encode("Once upon a time") == tokenizer.encode("Once upon a time")


@pytest.mark.parametrize(
    "name, fields",
    [
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer_config.json", {"eos_token": "<s>"}),
    ],
)
def test_a_tokenizer_that_its_class_loads_otherwise_is_not_equal(
    folder: Path, name: str, fields: dict[str, Any]
) -> None:
    tokenizer = HFTokenizer.from_folder(folder, (2,))
    found = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**found, **fields}))
    assert not tokenizer.equals_its_class(folder)
    (folder / "tokenizer.json").unlink()
    assert not tokenizer.equals_its_class(folder)
