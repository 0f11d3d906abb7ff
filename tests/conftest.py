"""What every test runs under: hypothesis profiles, and loud skips for hardware that is not there.

Tests have three tiers, one marker each and none for the first:

    quick   minutes for all of them; `make test`
    long    needs a second or more, or repeats what a quick test shows; with it `make test-all`
    soak    minutes to hours each; `make test-soak`

`ci` is the default: its examples come from the test itself, so a run repeats on any machine.
`soak` draws fresh examples, many more of them; `make test-soak` sets HYPOTHESIS_PROFILE=soak.
Neither draws constants from the sources of imported modules.
The 120 s limit per test is `timeout` in pyproject.toml. A wait in a test gives up after 60 s.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from tests.virtual_time import VirtualTime

# A shell that starts tests in the background has them ignore Ctrl-C. What they start must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing that importing and collecting make is garbage: see pytest_collection_finish.
gc.disable()

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=60,
    print_blob=True,
    # A shared machine stalls for reasons that are not the test's: no limit by the clock.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("soak", settings.get_profile("ci"), derandomize=False, max_examples=5000)
# For planted bugs: that a test fails is enough, and the first example shows it.
settings.register_profile(
    "mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
# Hypothesis would also draw the constants of all imported modules, and which of them a worker has
# imported depends on the tests that it ran before. There is no setting for that.
assert hasattr(providers, "is_local_module_file"), "hypothesis finds constants in another way now"
providers.is_local_module_file = lambda path: False


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Folder of what starts write for later starts, here and in processes of a test.

    The user's own would make a start of a test depend on tests of another day.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        # Checkpoints that the user has fetched stay where they are.
        patch.setenv("HF_HOME", os.environ.get("HF_HOME") or str(user_cache / "huggingface"))
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """A time that passes only where something sleeps or reads it."""
    virtual = VirtualTime()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, virtual.read)
    monkeypatch.setattr(time, "sleep", virtual.sleep)
    return virtual


@pytest.fixture(scope="session")
def openai() -> Any:
    """The package, which takes longer to import than most tests take."""
    return import_module("openai")


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """With `-n auto` one worker more than processors, with `-n logical` as many as processors.

    Tests of servers and processes wait half of their time. Those that compute gain nothing from
    another worker, which imports all that they import.
    """
    return (yield) + (config.getoption("numprocesses") == "auto")


def pytest_collection(session: pytest.Session) -> None:
    """Import each test in one of the workers, unless the command line names some of the tests.

    In a clean clone a test is compiled as it is imported, and what one worker has compiled another
    need not. Collecting goes through the files in one order: each worker would compile all.
    """
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    tests = Path(__file__).parent
    for file in sorted(tests.rglob("test_*.py"))[worker::workers]:
        module = ".".join(file.relative_to(tests.parent).with_suffix("").parts)
        # Collecting it says why it cannot be imported.
        with suppress(Exception, pytest.skip.Exception):
            import_module(module)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a worker, report of a test its call, and its setup and teardown only where they failed.

    The controller counts calls. It also receives, decodes and passes on each of the other events,
    which for a short test takes as long as the test.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` and `torch` tests with a reason where they cannot run; -ra prints the reasons."""
    for marker, missing in (("torch", _torch_missing), ("gpu", _gpu_missing)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        for item in marked:
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what importing and collecting made: it lives to the end.

    That is a million objects for some thousand tests, and each full collection would look at all
    of them. A small collection pays after more than the usual 700 objects, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def _torch_missing() -> str | None:
    return None if find_spec("torch") else "torch is not installed: pip install -e '.[hf]'"


def _gpu_missing() -> str | None:
    if reason := _torch_missing():
        return reason
    # By name: where torch is not installed, the type checker must not look for it either.
    cuda = import_module("torch.cuda")
    return None if cuda.is_available() else "torch sees no CUDA device"
