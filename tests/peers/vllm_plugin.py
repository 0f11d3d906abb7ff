"""Let vLLM's tests start forge: a plugin of pytest, in the environment of `tests/peers/run.py`.

    tests.utils.RemoteOpenAIServer  ──►  forge serve, on a model folder with the same tokenizer
    get_tokenizer, AutoTokenizer    ──►  that folder
    hf_api().snapshot_download      ──►  that folder

Owns the mapping of names and flags from vLLM's to forge's. A test that starts no server checks
classes of vLLM and is left out.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import results
import transformers
import vllm.config
import vllm.tokenizers
from forge_server import ForgeServer, UnsupportedFlag, folder_of, folder_with_template
from vllm.transformers_utils import repo_utils

# Flags of one word, and flags with a value, that change nothing in what a client sees.
IGNORED_SWITCHES = {
    "--enforce-eager",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",
    "--enable-tokenizer-info-endpoint",
    "--enable-server-load-tracking",
    "--enable-lora",
    "--no-async-scheduling",
    "--trust-remote-code",
}
IGNORED_OPTIONS = {
    "--attention-backend",
    "--config-format",
    "--dtype",
    "--gpu-memory-utilization",
    "--ignore-patterns",
    "--load-format",
    "--lora-modules",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--port",  # a test takes the server's address from it
    "--runner",
    "--structured-outputs-config.backend",
    "--tokenizer",
    "--tokenizer-mode",
}
# A name of vLLM for several formats -> the one of the models that these tests serve.
PARSER_NAMES = {"pythonic": "llama4_pythonic"}
SAME_SWITCHES = {
    "--enable-force-include-usage",
    "--enable-per-request-metrics",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--return-tokens-as-token-ids",
}
SAME_OPTIONS = {
    "--api-key",
    "--max-logprobs",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--reasoning-config",
    "--reasoning-parser",
    "--root-path",
    "--seed",
    "--served-model-name",
    "--tool-call-parser",
}


def forge_flags(model: str, flags: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the model folder and forge's flags for those of `vllm serve`."""
    words: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            name, equals, value = flag.partition("=")
            words += [name.replace("_", "-"), *([value] if equals else [])]
        else:
            words.append(flag)
    folder = folder_of(model, thinking="--reasoning-parser" in words)
    kept = [] if "--served-model-name" in words else ["--served-model-name", model]
    rest = iter(words)
    for word in rest:
        if word in SAME_SWITCHES:
            kept.append(word)
        elif word in SAME_OPTIONS:
            value = next(rest)
            kept += [word, PARSER_NAMES.get(value, value)]
        elif word == "--chat-template":
            folder = folder_with_template(folder, next(rest))
        elif word in IGNORED_OPTIONS:
            next(rest)
        elif word not in IGNORED_SWITCHES:
            raise UnsupportedFlag(word)
    return folder, kept


class RemoteOpenAIServer:
    """A running forge, as vLLM's tests address theirs."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        folder, flags = forge_flags(model, [*vllm_serve_args, "--seed", str(seed)])
        flags += ["--metrics-compat", "vllm"]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            flags += ["--api-key", key]
        self._server = ForgeServer(folder, flags)
        self.url_root = self._server.url
        self.host, self.port = self.url_root.removeprefix("http://").split(":")
        self.port = int(self.port)
        self.uds = None
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()

    @property
    def proc(self) -> Any:
        """Return the server's process."""
        return self._server.process

    def url_for(self, *parts: str) -> str:
        """Return the URL of a route."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client of this server."""
        return openai.OpenAI(**self._client_options(self.url_for("v1"), options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's asynchronous client of this server."""
        return openai.AsyncOpenAI(**self._client_options(self.url_for("v1"), options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return Anthropic's client of this server."""
        return anthropic.Anthropic(**self._client_options(self.url_root, options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return Anthropic's asynchronous client of this server."""
        return anthropic.AsyncAnthropic(**self._client_options(self.url_root, options))

    def _client_options(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        given = {"timeout": 600, "max_retries": 0, "api_key": self.DUMMY_API_KEY, "base_url": url}
        return given | options


def leave_test(*_: object, **__: object) -> Any:
    """Return a decorator that leaves the test as it is."""
    return lambda test: test


class HubApi:
    """The model hub, without a network."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        """Return the folder that stands for the repository."""
        return str(folder_of(repo_id, thinking=False))


def starts_server(item: pytest.Function) -> bool:
    """Return whether the test starts a server, itself or in a fixture."""
    functions = [item.function]
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        functions += [definition.func for definition in definitions]
    return any("RemoteOpenAIServer(" in inspect.getsource(each) for each in functions)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    items[:] = [item for item in items if starts_server(item)]
    results.leave_out_tests(config, items)


utils = types.ModuleType("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
utils.RemoteLaunchRenderServer = RemoteOpenAIServer
utils.VLLM_PATH = Path.cwd()
utils.ROCM_EXTRA_ARGS = []
utils.multi_gpu_test = utils.multi_gpu_only = utils.requires_fp8 = leave_test
utils.large_gpu_mark = lambda **_: pytest.mark.skip(reason="needs a GPU")
sys.modules["tests.utils"] = utils


def load_tokenizer(name: str | None = None, *_: object, **options: Any) -> Any:
    """Return the tokenizer that stands for the name's."""
    name = options.get("tokenizer_name", name)
    return read_tokenizer(folder_of(str(name), thinking=False))


initialise_model_config = vllm.config.ModelConfig.__init__


@functools.wraps(initialise_model_config)
def initialise_with_folder(config: Any, *, model: str, **options: Any) -> None:
    """Read vLLM's configuration of the folder that stands for the model's name."""
    initialise_model_config(config, model=str(folder_of(model, thinking=False)), **options)


vllm.config.ModelConfig.__init__ = initialise_with_folder
read_tokenizer = transformers.AutoTokenizer.from_pretrained
transformers.AutoTokenizer.from_pretrained = load_tokenizer
vllm.tokenizers.get_tokenizer = load_tokenizer
repo_utils.hf_api = HubApi

pytest_addoption = results.pytest_addoption
pytest_configure = results.pytest_configure
pytest_ignore_collect = results.leave_out_file
