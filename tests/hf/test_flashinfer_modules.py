"""FlashInfer's modules: which a model needs, which are ready, and how others are compiled."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.attention import flashinfer_modules  # noqa: E402
from forge.models.hf.attention.flashinfer_compiler import (  # noqa: E402
    build_command,
    build_environment,
    compile_in_background,
    compile_modules,
    run_in_background,
)
from forge.models.hf.attention.flashinfer_modules import (  # noqa: E402
    Obstacle,
    PrefillModule,
    find_nvcc,
    find_obstacle,
    may_have_modules,
    required_modules,
)
from forge.models.hf.attention.interface import LayerSpec  # noqa: E402
from forge.models.hf.kv_cache import KVCacheSpec  # noqa: E402
from forge.models.hf.loading.kernel_selection import NO_FLASHINFER, select_prefill  # noqa: E402

pytestmark = pytest.mark.torch
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FULL = LayerSpec(32, 8, 96, 0.1)
WINDOW, CAP = FULL._replace(window=128), FULL._replace(softcap=30.0)
CACHE = KVCacheSpec(4, 8, 128, torch.bfloat16)
FA3 = PrefillModule("fa3", torch.bfloat16, 128, has_window=False, has_softcap=False)
FA2 = FA3._replace(backend="fa2")


def test_full_attention_needs_both_backends_in_the_head_size_of_the_cache():
    assert required_modules([FULL, FULL], CACHE) == [FA3, FA2]


def test_windows_and_soft_caps_need_fa2_alone():
    modules = required_modules([WINDOW, CAP, FULL], CACHE)
    assert modules == [FA2._replace(has_window=True), FA2._replace(has_softcap=True), FA3, FA2]


@pytest.mark.parametrize("module", [FA3, FA2._replace(has_window=True, dtype=torch.float16)])
def test_a_module_survives_the_command_line(module: PrefillModule):
    assert PrefillModule.from_word(build_command([module])[-1]) == module


def write_module(base: Path, version: str) -> None:
    name = "batch_prefill_with_kv_cache_dtype_q_bf16"
    folder = base / ".cache" / "flashinfer" / version / "90a" / "cached_ops" / name
    folder.mkdir(parents=True)
    (folder / f"{name}.so").touch()


@pytest.mark.parametrize(("compiled", "found"), [("0.6.14", True), ("0.6.13", False)])
def test_modules_of_the_installed_version_count(
    compiled: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(flashinfer_modules, "version", lambda name: "0.6.14")
    write_module(tmp_path, compiled)
    assert may_have_modules() is found


def test_modules_of_an_ahead_of_time_build_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "empty"))
    monkeypatch.setattr(flashinfer_modules, "version", lambda name: "0.6.14")
    assert not may_have_modules()
    name = "batch_prefill_with_kv_cache_dtype_q_bf16"
    (package / "data" / "aot" / name).mkdir(parents=True)
    (package / "data" / "aot" / name / f"{name}.so").touch()
    assert may_have_modules()


NINJA = """#!/bin/sh
grep -q "$5" "{ready}" && echo "ninja: no work to do." || echo "[1/9] nvcc"
"""


class Library:
    """A machine with a GPU and FlashInfer; `ready` has the names of modules that are up to date."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability, self.ready = (9, 0), tmp_path / "ready"
        self.ready.write_text("")
        ninja = tmp_path / "ninja"
        ninja.write_text(NINJA.format(ready=self.ready))
        ninja.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        for name, value in (
            ("is_installed", lambda: True),
            ("may_have_modules", lambda: True),
            ("load_wrappers", lambda: None),
            ("describe_prefill_module", self.describe),
        ):
            monkeypatch.setattr(flashinfer_modules, name, value)
        self.aot: set[str] = set()
        self.broken: set[str] = set()

    def describe(self, backend: str, *rest: Any, **flags: bool) -> Any:
        def build_and_load() -> None:
            if backend in self.broken:
                raise ImportError("libcudart.so.12: cannot open shared object file")

        return SimpleNamespace(
            build_and_load=build_and_load,
            is_aot=backend in self.aot,
            is_compiled=True,
            write_ninja=lambda: None,
            build_dir="/",
            ninja_path=backend,
        )


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(tmp_path, monkeypatch)


def test_modules_serve_where_ninja_has_nothing_to_do(library: Library):
    library.ready.write_text("fa3 fa2")
    assert find_obstacle([FA3, FA2], CUDA) is None


def test_one_stale_module_is_enough_for_triton(library: Library):
    """FlashInfer would compile it in the first step that needs it."""
    library.ready.write_text("fa3")
    obstacle = find_obstacle([FA3, FA2], CUDA)
    assert obstacle == ("not compiled: fa2 for heads of 128", (FA2,))


def test_modules_of_the_aot_package_need_no_ninja(library: Library):
    library.aot = {"fa2", "fa3"}
    assert find_obstacle([FA3, FA2], CUDA) is None


def test_other_gpus_have_no_fa3(library: Library):
    library.capability = (8, 6)
    obstacle = find_obstacle([FA3], CUDA)
    assert obstacle == ("FA3 runs on compute capability 9.x, this GPU has 8.6", ())


def test_an_error_of_the_library_is_an_obstacle_and_no_failure(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: Any, **flags: bool) -> None:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(flashinfer_modules, "describe_prefill_module", fail)
    # No compilation: the next start would find the same error.
    assert find_obstacle([FA3], CUDA) == ("it cannot be used: unexpected argument", ())


def test_a_module_that_does_not_load_is_an_obstacle(library: Library):
    """It was compiled with another CUDA, say; or its lock cannot be written."""
    library.aot, library.broken = {"fa2", "fa3"}, {"fa2"}
    expected = ("it cannot be used: libcudart.so.12: cannot open shared object file", ())
    assert find_obstacle([FA3, FA2], CUDA) == expected


def test_a_user_without_a_home_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
):
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(flashinfer_modules, "is_installed", lambda: True)
    monkeypatch.setattr(flashinfer_modules, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    expected = ("it cannot be used: Could not determine home directory.", ())
    assert find_obstacle([FA3], CUDA) == expected


def test_nvcc_is_that_of_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("")
    nvcc.chmod(0o755)
    assert find_nvcc() == str(nvcc)


def test_a_cpu_has_no_choice_and_no_log_line(caplog: pytest.LogCaptureFixture):
    assert select_prefill([FULL], CACHE, CPU) is NO_FLASHINFER
    assert caplog.records == []


NOT_COMPILED = Obstacle("not compiled: fa2", (FA2,))


def choose(
    monkeypatch: pytest.MonkeyPatch,
    obstacle: Obstacle,
    nvcc: str | None,
    others: tuple[str, ...] = ("ninja", "c++"),
) -> Any:
    """Return the chosen kernels on a machine with these tools."""
    from forge.models.hf.loading import kernel_selection

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(kernel_selection, "find_obstacle", lambda modules, device: obstacle)
    monkeypatch.setattr(flashinfer_modules, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(flashinfer_modules.shutil, "which", lambda name: name in others or None)
    return select_prefill([FULL], CACHE, CUDA)


def test_what_is_missing_is_compiled_where_nvcc_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    chosen = choose(monkeypatch, NOT_COMPILED, "/cuda/bin/nvcc")
    assert chosen.wrappers is None and chosen.to_compile == (FA2,)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "Triton's kernel" in record.getMessage() and "next start" in record.getMessage()


def test_without_nvcc_nothing_is_compiled_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    assert choose(monkeypatch, NOT_COMPILED, None).to_compile == ()
    assert "there is no nvcc" in caplog.text


def test_without_a_host_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    assert choose(monkeypatch, NOT_COMPILED, "/cuda/bin/nvcc", ("ninja",)).to_compile == ()
    assert "there is no c++" in caplog.text


def test_nothing_is_compiled_where_flashinfer_may_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert choose(monkeypatch, NOT_COMPILED, "/cuda/bin/nvcc").to_compile == ()
    assert "no permission (FLASHINFER_DISABLE_JIT) to compile them" in caplog.text


def test_nothing_is_compiled_where_that_removes_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Another version of FlashInfer would be compiled at every start, and never used."""
    obstacle = Obstacle("it cannot be used: flashinfer 0.7.0 is not the one that forge calls")
    assert choose(monkeypatch, obstacle, "/cuda/bin/nvcc").to_compile == ()
    assert "next start" not in caplog.text


# The process in the background.


def test_the_process_sees_no_gpu_and_takes_half_of_the_processors(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = build_environment("9.0", 2)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "9.0"
    assert 1 <= int(environment["MAX_JOBS"]) * 2 <= max(2, len(os.sched_getaffinity(0)) // 2)
    script = build_command([FA3])[3]
    assert script.index("os.nice(19)") < script.index("from forge")


def test_every_module_is_built_by_itself(library: Library, monkeypatch: pytest.MonkeyPatch):
    """A ninja for all modules would have its log elsewhere, and all would be compiled again."""
    built = []

    def describe(backend: str, *rest: Any, **flags: bool) -> Any:
        return SimpleNamespace(build=lambda verbose: built.append((backend, verbose)))

    monkeypatch.setattr(flashinfer_modules, "describe_prefill_module", describe)
    compile_modules([FA3.to_word(), FA2.to_word()])
    assert sorted(built) == [("fa2", False), ("fa3", False)]


def run(code: str, caplog: pytest.LogCaptureFixture) -> str:
    """Run Python code in the background to its end and return what was logged."""
    with run_in_background([sys.executable, "-S", "-c", code], {}) as process:
        process.wait(20)
        for _ in range(2000):
            if caplog.records:
                break
            time.sleep(0.01)
    return caplog.text


def test_the_end_of_the_compilation_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "forge.start")
    assert "the next start uses them" in run("pass", caplog)


def test_a_failed_compilation_is_a_warning_with_its_last_words(caplog: pytest.LogCaptureFixture):
    text = run("raise SystemExit('nvcc fatal: no such file')", caplog)
    assert "WARNING" in text and "Triton's go on serving: nvcc fatal: no such file" in text


def test_the_end_of_a_server_ends_the_compilation_and_its_children(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    has_child = tmp_path / "has_child"
    command = ["sh", "-c", f"sleep 60 & touch {has_child}; wait"]
    with run_in_background(command, os.environ) as process:
        group = process.pid
        while not has_child.exists():
            time.sleep(0.01)
    assert process.returncode not in (0, None)
    with pytest.raises(ProcessLookupError):
        for _ in range(2000):
            os.killpg(group, 0)
            time.sleep(0.01)
    assert caplog.records == []


@pytest.fixture
def compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """The background process in a compilation that does not end.

    As in an engine's process, SIGTERM is ignored. The working directory has a file with the name of
    a module.
    """
    began, folder = tmp_path / "began", tmp_path / "packages/forge/models/hf/attention"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:3]):
        (package / "__init__.py").touch()
    (folder / "flashinfer_compiler.py").write_text(
        "import pathlib, time\n"
        "def compile_modules(words):\n"
        "    oom_score = pathlib.Path('/proc/self/oom_score_adj').read_text()\n"
        f"    began = pathlib.Path({str(began)!r})\n"
        "    began.with_suffix('.new').write_text(oom_score)\n"
        "    began.with_suffix('.new').rename(began)\n"
        "    time.sleep(60)\n"
    )
    (tmp_path / "signal.py").write_text("raise SystemExit('from the working directory')\n")
    monkeypatch.chdir(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path / "packages")}
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with run_in_background(build_command([FA3]), environment) as process:
            while not began.exists() and process.poll() is None:
                time.sleep(0.01)
            # The kernel ends the process with the highest score first: not the server.
            assert int(began.read_text()) == 1000
            yield process
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert process.returncode == -signal.SIGTERM


def test_the_end_of_an_engine_that_ignores_sigterm_terminates_the_compilation(
    compilation: subprocess.Popen[str],
):
    """SIGKILL would end ninja and leave its compilers."""
    assert compilation.poll() is None  # The fixture has the rest.


def test_the_death_of_the_parent_terminates_the_compilation(compilation: subprocess.Popen[str]):
    """A killed process closes its end of the pipe, and does nothing else."""
    assert compilation.stdin is not None
    compilation.stdin.close()
    assert compilation.wait(20) == -signal.SIGTERM


def test_a_process_that_cannot_be_started_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with compile_in_background([FA3], "9.0"):
        pass
    assert "WARNING" in caplog.text and "are not compiled: [Errno 2]" in caplog.text
