"""Let SGLang's tests start forge: a plugin of pytest, in the environment of `tests/peers/run.py`.

    sglang.test.test_utils.popen_launch_server  ──►  forge serve
    sglang.srt.utils.kill_process_tree          ──►  its end
    sglang.test.kits                            ──►  SGLang's own

Owns the mapping of names and flags from SGLang's to forge's. Nothing else of SGLang is imported:
these modules take the place of its packages.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import results
from forge_server import ForgeServer, UnsupportedFlag, folder_of
from transformers import AutoTokenizer

SOURCE = Path.cwd()

IGNORED_SWITCHES = {
    "--disable-cuda-graph",
    "--disable-prefill-cuda-graph",
    "--enable-cache-report",
}
IGNORED_OPTIONS = {"--decode-log-interval", "--max-total-token", "--max-total-tokens", "--tp-size"}
RENAMED_OPTIONS = {
    "--context-len": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--random-seed": "--seed",
    "--reasoning-parser": "--reasoning-parser",
    "--served-model-name": "--served-model-name",
    "--tool-call-parser": "--tool-call-parser",
}
# SGLang's names of formats that forge names as vLLM does.
PARSER_NAMES = {
    "qwen25": "hermes",
    "qwen": "hermes",
    "deepseek-r1": "deepseek_r1",
    "llama3": "llama3_json",
    "pythonic": "llama4_pythonic",
}


def forge_flags(model: str, flags: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the model folder and forge's flags for those of `sglang.launch_server`."""
    words = [str(flag) for flag in flags]
    folder = folder_of(model, thinking="--reasoning-parser" in words)
    kept = [] if "--served-model-name" in words else ["--served-model-name", model]
    rest = iter(words)
    for word in rest:
        if word in RENAMED_OPTIONS:
            value = next(rest)
            kept += [RENAMED_OPTIONS[word], PARSER_NAMES.get(value, value)]
        elif word in IGNORED_OPTIONS:
            next(rest)
        elif word not in IGNORED_SWITCHES:
            raise UnsupportedFlag(word)
    return folder, kept


servers: dict[int, ForgeServer] = {}


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[str] = (),
    **_: object,
) -> subprocess.Popen[str]:
    """Start forge at the address."""
    folder, flags = forge_flags(model, other_args or ())
    if api_key:
        flags += ["--api-key", api_key]
    server = ForgeServer(folder, flags, port=int(base_url.rsplit(":", 1)[1]))
    servers[server.process.pid] = server
    return server.process


def kill_process_tree(process_id: int, **_: object) -> None:
    """Stop the server of the process."""
    servers.pop(process_id).stop()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def load_tokenizer(name: str, *_: object, **__: object) -> Any:
    """Return the tokenizer that stands for the name's."""
    return AutoTokenizer.from_pretrained(folder_of(name, thinking=False))


def ignore_call(*_: object, **__: object) -> None:
    """Register nothing: these are not SGLang's machines."""


class NamesOfModels(types.ModuleType):
    """A module that has a name for any model that a test imports."""

    def __getattr__(self, name: str) -> str:
        if not name.isupper():
            raise AttributeError(name)
        return f"peers/{name.lower()}"


def add_module(name: str, **attributes: object) -> None:
    """Put a module in place of SGLang's."""
    module = NamesOfModels(name)
    module.__path__ = [str(SOURCE / "python" / name.replace(".", "/"))]
    vars(module).update(attributes)
    sys.modules[name] = module


class CustomLogitProcessor:
    """A logits processor in Python, which forge does not run."""

    def to_str(self) -> str:
        """Return its serialised form."""
        return ""


for package in (
    *("sglang", "sglang.srt", "sglang.srt.sampling", "sglang.test", "sglang.test.ci"),
    *("sglang.srt.entrypoints", "sglang.srt.entrypoints.anthropic"),
):
    add_module(package)
add_module("sglang.srt.sampling.custom_logit_processor", CustomLogitProcessor=CustomLogitProcessor)
add_module("sglang.srt.utils", kill_process_tree=kill_process_tree, load_audio=ignore_call)
add_module("sglang.srt.utils.hf_transformers_utils", get_tokenizer=load_tokenizer)
add_module("sglang.test.ci.ci_register", register_amd_ci=ignore_call, register_cuda_ci=ignore_call)
add_module("sglang.srt.entrypoints.anthropic.protocol", AnthropicMessagesRequest=None)
add_module("sglang.srt.entrypoints.anthropic.serving", AnthropicServing=None)
add_module("sglang.test.runners", TEST_RERANK_QUERY_DOCS=[])
add_module(
    "sglang.test.test_utils",
    CustomTestCase=unittest.TestCase,
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH=60,
    DEFAULT_URL_FOR_TEST=f"http://127.0.0.1:{free_port()}",
    is_in_amd_ci=lambda: False,
    is_in_ci=lambda: False,
    is_rust_server_built=lambda: False,
    popen_launch_server=popen_launch_server,
)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Stop the servers of classes whose end failed."""
    for process_id in list(servers):
        os.kill(process_id, signal.SIGTERM)


pytest_addoption = results.pytest_addoption
pytest_configure = results.pytest_configure
pytest_collection_modifyitems = results.leave_out_tests
pytest_ignore_collect = results.leave_out_file
