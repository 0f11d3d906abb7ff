"""Compiled modules: the same numbers, few graphs for every step, and refusals instead of fallbacks.

Most tests compile without a code generator, which is where layers become graphs and where graphs
are chosen. One makes machine code.
"""

from __future__ import annotations

import gc
import logging
import math
import shutil
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.cli.main import main  # noqa: E402
from forge.config import DeviceOptions, EngineConfig  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.llm import LLM  # noqa: E402
from forge.models.capture_sizes import decode_capture_sizes  # noqa: E402
from forge.models.hf.attention.interface import LayerSpec  # noqa: E402
from forge.models.hf.decoders.comparison import logits_error, probe_logits  # noqa: E402
from forge.models.hf.decoders.compiled_decoder import CompiledDecoder, compile_decoder  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    ModuleDecoder,
    register_attention,
)
from forge.models.hf.loading.checkpoint import module_parameters  # noqa: E402
from forge.models.hf.loading.decoder_loader import build_compiled_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.weights import ModelWeights  # noqa: E402
from forge.pause import PauseMode  # noqa: E402
from forge.request import Request, SamplingParams  # noqa: E402
from forge.weights import NamedWeights  # noqa: E402
from tests.hf.families import SMALL, create_module, generate_greedy, is_greedy  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(600),
    # torch's compiler, about torch.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
VOCAB, EOS = 307, 2
TRACED = "aot_eager"
"""Backend that makes graphs as for machine code and runs them in torch."""
CAPTURED = "eager"
"""Backend that runs graphs as they were traced."""
BACKENDS = {"gpt2": CAPTURED, "gemma2": CAPTURED, "qwen3": TRACED}
"""Backend by family: forge's operator is made functional in the same way in every family."""

needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


class LayersModel(torch.nn.Module):
    """Causal model of two layers that do not attend. Its graphs are made quickly."""

    base_model_prefix = "model"
    specs = (LayerSpec(1, 1, 8, 1.0),)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    dtype = torch.float32

    def __init__(self, create_layer: Callable[[], Any]) -> None:
        super().__init__()
        self.model = self.base_model = _LayersModelBase(create_layer)

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def forward(self, inputs_embeds: Any, use_cache: bool) -> Any:
        return SimpleNamespace(logits=inputs_embeds)


class _LayersModelBase(torch.nn.Module):
    """Embedding and layers of a LayersModel."""

    def __init__(self, create_layer: Callable[[], Any]) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCAB, 8)
        self.layers = torch.nn.ModuleList(create_layer() for _ in "ab")

    def forward(self, input_ids: Any, position_ids: Any, use_cache: bool, paged: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, paged=paged)
        return SimpleNamespace(last_hidden_state=hidden)


class LinearLayer(torch.nn.Linear):
    """A layer that is one matrix."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Any, paged: Any) -> Any:
        return super().forward(x)


@pytest.fixture(scope="module", params=BACKENDS)
def family(request: pytest.FixtureRequest) -> str:
    """Name of a family. The tests of one run in succession, so that one worker compiles it."""
    name: str = request.param
    return name


@cache
def compiled_family(family: str, dtype: Any) -> Any:
    register_attention()
    module = create_module(family, dtype, ATTENTION_NAME)
    return build_compiled_decoder(module, 512, BACKENDS[family])


def create_engine(decoder_and_layers: Any, device: Any, dtype: Any, **recorded: Any) -> Engine:
    """Return an engine that computes prompts in chunks of 16 tokens."""
    decoder, layers = decoder_and_layers
    config = EngineConfig(
        num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=16,
        max_model_len=512, enable_prefix_caching=False,
    )  # fmt: skip
    with torch.inference_mode():
        model = assemble_model(
            decoder,
            layers,
            select_kv_cache_spec(layers, dtype, device),
            config,
            vocab_size=VOCAB,
            eos_token=EOS,
            device=device,
            **recorded,
        )
    return Engine(model, config)


def generate_outputs(
    decoder_and_layers: Any, device: Any, dtype: Any, **recorded: Any
) -> list[list[int]]:
    """Return greedy tokens of four requests, whose prompts are computed in chunks."""
    return generate(create_engine(decoder_and_layers, device, dtype, **recorded))


def generate(engine: Engine) -> list[list[int]]:
    """Return greedy tokens of four requests."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for i, prompt in enumerate(prompts()):
        engine.submit(Request(i, tuple(prompt), params))
    found: list[list[int]] = [[] for _ in prompts()]
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            found[delta.request_id] += delta.tokens
    return found


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(6)
    return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in (1, 9, 30, 41)]


def forge_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log records of forge, phases of the start excluded. torch traces its compiler."""
    records = [record for record in caplog.records if record.name.startswith("forge")]
    return [record for record in records if record.name != "forge.start"]


# The same numbers.


def test_compiled_modules_give_the_logits_of_the_modules(family: str) -> None:
    decoder, layers = compiled_family(family, torch.float64)
    assert logits_error(ModuleDecoder(decoder.module), decoder, layers, range(24)) < 1e-12


def test_greedy_tokens_of_compiled_modules_are_those_of_the_modules(family: str) -> None:
    tokens = generate_outputs(
        compiled_family(family, torch.float64), torch.device("cpu"), torch.float64
    )
    module = create_module(family, torch.float64)
    for prompt, output in zip(prompts(), tokens, strict=True):
        assert len(output) == 24 and is_greedy(module, prompt, output)


@pytest.mark.long
def test_compiled_modules_are_updated_and_sleep_without_another_graph() -> None:
    decoder, layers = build_compiled_decoder(
        create_module("qwen3", torch.float64, ATTENTION_NAME), 512, CAPTURED
    )
    weights = ModelWeights(module_parameters(decoder.module))
    device = torch.device("cpu")
    engine = create_engine((decoder, layers), device, torch.float64, weights=weights)
    trained = create_module("qwen3", torch.float64, seed=1)
    new = NamedWeights(dict(trained.named_parameters()))
    expected = [generate_greedy(trained, prompt, 24) for prompt in prompts()]
    assert generate(engine) != expected
    engine.update_weights(new, namespace="new")
    assert generate(engine) == expected
    for level in (1, 2):
        engine.pause(PauseMode.KEEP)
        engine.sleep(level)
        engine.wake()
        if level == 2:
            engine.update_weights(new, namespace="newer")
        engine.resume()
        assert generate(engine) == expected
    assert decoder.backend.num_graphs == 2


def test_layers_give_the_same_logits_where_torch_runs_no_graph() -> None:
    """A compiled layer computes what the layer does, with any backend."""
    decoder, layers = compiled_family("qwen3", torch.float64)
    with torch.compiler.set_stance("force_eager"):
        assert logits_error(ModuleDecoder(decoder.module), decoder, layers, range(24)) < 1e-12


@pytest.mark.long
@needs_a_compiler
def test_a_folder_is_served_in_machine_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2, which is never fused, compiled by the backend that the flag selects.

    Without vector instructions: torch compiles a program for each kind, to find whether it works.
    """
    folder = save_checkpoint(tmp_path, "gpt2")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 32}
    scalar = torch._inductor.config.patch({"cpp.vec_isa_ok": False})
    with scalar, LLM(str(folder), torch_compile=True, **options) as llm:
        decoder = llm.engine.model._runner.decoder
        assert type(decoder) is CompiledDecoder
        made = decoder.backend.num_graphs
        outs = llm.generate(["Once upon a time", "a", "the end of it"], params)
        assert decoder.backend.num_graphs == made == 2
        modules = ModuleDecoder(decoder.module)
        assert 0 < logits_error(modules, decoder, modules.inspect_layers(), range(24)) < 1e-4
    module = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for out in outs:
        assert out.token_ids == generate_greedy(module, out.prompt_token_ids, 12)
    assert forge_records(caplog) == []


# Few graphs.


def test_two_graphs_serve_all_layers_and_every_number_of_tokens(family: str) -> None:
    """Also in another thread: a server's steps run in one."""
    decoder, layers = compiled_family(family, torch.float64)
    assert len(layers) == 3 and decoder.backend.num_graphs == 2

    @torch.inference_mode()
    def steps() -> None:
        for count in [*range(1, 33), 32, 1, 17]:
            ids = torch.arange(count, dtype=torch.int32)
            ran.append(probe_logits(decoder, ids, range(count), layers, torch.float64).shape[0])

    ran: list[int] = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps()
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    assert ran == 2 * [*range(1, 33), 32, 1, 17]
    assert decoder.backend.num_graphs == 2


def test_two_models_of_one_kind_have_graphs_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One model's graphs do not count against the other's limit.

    Outside of inference mode no graph fits: one is compiled after the start, with a warning.
    """
    one, other = (
        compile_decoder(LayersModel(LinearLayer), LayersModel.specs, CAPTURED) for _ in "ab"
    )
    assert one.backend.num_graphs == other.backend.num_graphs == 2
    assert forge_records(caplog) == []
    five = torch.arange(5, dtype=torch.int32)
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        probe_logits(other, five, range(5), LayersModel.specs, torch.float32)
    assert (one.backend.num_graphs, other.backend.num_graphs) == (2, 3)
    (record,) = forge_records(caplog)
    assert record.levelno == logging.WARNING and "after the start" in record.getMessage()


def test_nothing_holds_a_compiled_model_that_is_gone() -> None:
    decoder, _ = build_compiled_decoder(
        create_module("qwen3", torch.float32, ATTENTION_NAME), 512, CAPTURED
    )
    assert decoder._holder.context is None
    weight = weakref.ref(decoder.module.base_model.layers[0].mlp.up_proj.weight)
    seat = weakref.ref(decoder._holder)
    del decoder
    gc.collect()
    assert weight() is None and seat() is None


# Refusals.


def refusal(module: Any, backend: Any = CAPTURED) -> str:
    with pytest.raises(InvalidConfig) as caught:
        compile_decoder(module, LayersModel.specs, backend)
    assert caught.value.option == "torch_compile"
    return str(caught.value)


class HostReadingLayer(torch.nn.Module):
    """A layer that reads a number of the device on the host."""

    def forward(self, x: Any, paged: Any) -> Any:
        return x if x.sum().item() > 0 else -x


FACTORS = [n / 1000 for n in range(300)]


class SizeDependentLayer(torch.nn.Module):
    """A layer with another constant for each number of tokens."""

    def forward(self, x: Any, paged: Any) -> Any:
        return x * FACTORS[x.shape[1]]


def test_a_layer_that_is_not_one_graph_is_refused() -> None:
    message = refusal(LayersModel(HostReadingLayer))
    assert "LayersModel cannot be compiled" in message and message.endswith("Leave it out")
    assert "\n" not in message


def test_a_layer_with_a_graph_for_each_number_of_tokens_is_refused() -> None:
    message = refusal(LayersModel(SizeDependentLayer))
    assert "LayersModel needs a graph for each number of tokens" in message


def test_layers_that_are_no_list_are_refused() -> None:
    module = create_module("qwen3", torch.float32, ATTENTION_NAME)
    layers = ModuleDecoder(module).inspect_layers()
    module.config.num_hidden_layers = 4
    with pytest.raises(InvalidConfig, match="torch_compile: Qwen3ForCausalLM has no list of 4"):
        compile_decoder(module, layers, CAPTURED)


def test_a_compiler_that_computes_something_else_is_refused() -> None:
    def doubling(graph: Any, inputs: list[Any]) -> Any:
        return lambda *given: tuple(2 * out for out in graph(*given))

    with pytest.raises(InvalidConfig, match=r"from the modules as they are\. Leave it out"):
        build_compiled_decoder(create_module("gpt2", torch.float32, ATTENTION_NAME), 512, doubling)


def test_a_compiler_that_fails_is_refused_with_what_it_said() -> None:
    def failing(graph: Any, inputs: list[Any]) -> Any:
        raise FileNotFoundError("no tool\nis here " + 500 * "x")

    message = refusal(LayersModel(LinearLayer), failing)
    assert "(FileNotFoundError: no tool is here xxx" in message and len(message) < 400


def test_where_compilation_is_turned_off_that_is_refused() -> None:
    with torch._dynamo.config.patch(disable=True):
        message = refusal(LayersModel(LinearLayer))
    assert "is turned off in this environment. Unset TORCHDYNAMO_DISABLE" in message


def test_faults_that_the_environment_silences_are_refused() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        assert "cannot be compiled" in refusal(LayersModel(HostReadingLayer))


def test_without_a_compiler_the_command_ends_with_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import fresh_cache

    folder = save_checkpoint(tmp_path)
    capsys.readouterr()
    nothing = {"cpp.cxx": (None, "/none/such/compiler")}
    with fresh_cache(), torch._inductor.config.patch(nothing):
        status = main(["generate", "a", "--model", str(folder), "--device=cpu", "--torch-compile"])
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    message = "--torch-compile: no C++ compiler works here. Install g++, or leave it out"
    assert line == f"forge generate: {message}"


def test_torch_compile_is_a_boolean() -> None:
    assert DeviceOptions(torch_compile=True).torch_compile
    with pytest.raises(InvalidConfig, match=r"^torch_compile: 'yes' is no boolean. Give one"):
        DeviceOptions(torch_compile="yes")


def test_steps_as_they_are_and_compiled_modules_exclude_each_other() -> None:
    with pytest.raises(InvalidConfig, match=r"^torch_compile: enforce_eager .* Leave one of the"):
        DeviceOptions(torch_compile=True, enforce_eager=True)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_tokens_of_captured_steps_of_compiled_modules_are_those_without_graphs(
    kind: str,
) -> None:
    medium = {**SMALL, "hidden_size": 256, "intermediate_size": 384, "head_dim": 128}
    scaled = {"query_pre_attn_scalar": 128, "sliding_window": 20}
    config = hf.Qwen3Config(**medium) if kind == "qwen3" else hf.Gemma2Config(**medium, **scaled)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in module.parameters():
            noise = torch.randn(tensor.shape) / math.sqrt(tensor.shape[-1])
            tensor.copy_(1.2 * noise if tensor.dim() > 1 else tensor + noise)
    cuda = torch.device("cuda")
    both = build_compiled_decoder(module.to(cuda, torch.bfloat16).eval(), 512)
    made = both[0].backend.num_graphs
    plain = generate_outputs(both, cuda, torch.bfloat16)
    # Every batch size, so that a row is computed with as many others as without graphs.
    recorded = generate_outputs(both, cuda, torch.bfloat16, decode_sizes=range(1, 9))
    assert recorded == plain
    sizes = {"decode_sizes": decode_capture_sizes(8), "mixed_sizes": (16,)}
    assert [len(tokens) for tokens in generate_outputs(both, cuda, torch.bfloat16, **sizes)] == [
        24
    ] * 4
    assert both[0].backend.num_graphs == made
