"""Compilation of FlashInfer's modules in the background, for the next start.

Owns the process that compiles and its one line in the log. The kernels of this run stay what they
are: graphs hold them, and outputs of one run come from the same kernels.

    serving process                            python -P -c ... fa3,bfloat16,128,0,0 fa2,...
      compile_in_background() ──Popen──►         lowest priority, half of the CPUs, no GPU visible
      thread waits, logs the end     ◄──         a ninja for each module, all at the same time
      end of the context: terminate
      end of the process, even killed  ──►       stdin ends: it terminates itself and its ninjas

Each module has a ninja of its own, in the module's folder: FlashInfer runs ninja there before it
loads the module, and ninja reads its log there. Another log would mean another compilation.
Always true: the process sees no GPU. It creates no CUDA context and takes no GPU memory.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from forge.cpu_count import num_usable_cpus
from forge.models.hf.attention.flashinfer_modules import PrefillModule

LOG = logging.getLogger("forge.start")

LOWEST_PRIORITY = 19
MAX_ERROR_CHARS = 300

STOP_TIMEOUT_S = 5.0
"""Seconds that the end of a server waits for a terminated compilation."""

SCRIPT = """
import contextlib, os, signal, sys, threading
os.nice({priority})
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from forge.models.hf.attention.flashinfer_compiler import compile_modules
compile_modules(sys.argv[1:])
"""
"""Program of the process, whose stdin is a pipe that its parent never writes to.

Priority, signals and the watch of stdin come before any large import. An engine's process ignores
SIGTERM, and a child inherits that. ninja passes SIGTERM on to its compilers, but dies of SIGKILL.
Where memory ends, the kernel ends a compiler first, and not the server.
"""


@contextmanager
def compile_in_background(modules: Sequence[PrefillModule], architectures: str) -> Iterator[None]:
    """Compile the modules in another process until the context ends.

    A process that cannot be started is a warning in the log.
    architectures   of all GPUs that FlashInfer sees in this process, such as "9.0": its folder is
                    named after them
    """
    environment = build_environment(architectures, len(modules))
    with ExitStack() as exit_stack:
        try:
            exit_stack.enter_context(run_in_background(build_command(modules), environment))
        except OSError as error:
            LOG.warning("FlashInfer's prefill kernels are not compiled: %s", error)
        yield


@contextmanager
def run_in_background(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a session of its own until the context ends, and log how it ended.

    A command that has not ended by then is terminated, with all its processes, and nothing is
    logged. Its stdin ends when this process ends.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_closing = threading.Event()
    thread = threading.Thread(
        target=_log_end, args=(process, is_closing), name="forge-flashinfer", daemon=True
    )
    thread.start()
    try:
        yield process
    finally:
        is_closing.set()
        _signal_session(process, signal.SIGTERM)
        thread.join(STOP_TIMEOUT_S)
        _signal_session(process, signal.SIGKILL)
        thread.join(STOP_TIMEOUT_S)
        if process.stdin is not None:
            process.stdin.close()


def build_command(modules: Sequence[PrefillModule]) -> list[str]:
    """Return the command that compiles the modules."""
    script = SCRIPT.format(priority=LOWEST_PRIORITY)
    # -P: no module of the working directory takes the place of a package.
    return [sys.executable, "-P", "-c", script, *(module.to_word() for module in modules)]


def build_environment(architectures: str, num_modules: int) -> dict[str, str]:
    """Return the environment of the process, without GPUs and with half of the CPUs."""
    num_jobs = max(1, num_usable_cpus() // (2 * num_modules))
    return {
        "MAX_JOBS": str(num_jobs),
        "FLASHINFER_CUDA_ARCH_LIST": architectures,
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        # The same packages, wherever this process found them.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def compile_modules(words: Sequence[str]) -> None:
    """Compile the modules that the words stand for, all at the same time."""
    specs = [PrefillModule.from_word(word).describe() for word in words]
    with ThreadPoolExecutor(len(specs)) as executor:
        for _ in executor.map(lambda spec: spec.build(verbose=False), specs):
            pass


def _signal_session(process: subprocess.Popen[str], signal_number: int) -> None:
    """Send a signal to the process and its children, ninja and nvcc, if it has not ended."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal_number)


def _log_end(process: subprocess.Popen[str], is_closing: threading.Event) -> None:
    """Wait for the process and log its end, unless its context ended it."""
    started_s = time.monotonic()
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read()  # `communicate` would close stdin
    process.wait()
    elapsed_s = time.monotonic() - started_s
    if is_closing.is_set():
        return
    if process.returncode:
        LOG.warning(
            "FlashInfer's prefill kernels do not compile, Triton's go on serving: %s",
            " ".join(output.split())[-MAX_ERROR_CHARS:],
        )
    else:
        LOG.info(
            "FlashInfer's prefill kernels are compiled in %.0f s; the next start uses them",
            elapsed_s,
        )
