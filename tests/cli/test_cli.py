"""The command line, as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge import __version__
from forge.cli.commands import describe_capacity, format_banner
from forge.cli.options import (
    ADDRESS_VARIABLE,
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    SERVE_OPTIONS,
    SPECULATIVE_OPTIONS,
    TYPE_NAMES,
    Option,
)
from forge.cli.settings import resolve_settings
from forge.cli.vllm_options import VLLM_OPTIONS, vllm_remedy
from forge.config import (
    MAX_GEOMETRY,
    DeviceOptions,
    DiskTier,
    EngineConfig,
    HostTier,
    Speculation,
)
from forge.engine_options import Options
from forge.errors import InvalidRequest
from forge.kv_event_options import KVEventOptions
from forge.llm import LLM
from forge.models.loader import SPECULATION_OPTIONS
from forge.request import SamplingParams
from forge.tier_options import TierOptions
from tests.server.local_server import unexpected_log

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "Command-line.md"
TIMEOUT_S = 60.0

# Runs each [words, environment, file for stdout, file for stderr] line in a fork of its own.
# A fork ends without taking the interpreter down: that would copy all of its memory first.
# What commands import while they run is imported before: no fork needs to import it again.
FORKS = """
import gc, json, multiprocessing.connection, os, sys, yaml
import forge.bench.commands, forge.bench.kv_commands, forge.models.llama_model
import forge.requirements, forge.server.http_server, forge.sim.commands
from forge.cli.main import main
def run(words):
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
gc.freeze()
for line in sys.stdin:
    words, environment, *files = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in enumerate([os.devnull, *files]):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(environment)
        run(words)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what would set options."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    return {**inherited, **extra}


def start_forge(*words: str | bytes, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "forge", *words],
        cwd=ROOT,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def run_forge(*words: str | bytes, **env: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `python -m forge words...`."""
    with start_forge(*words, **env) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    return process.returncode, out, err


class ForkedForge:
    """Runs `forge` in forks of one process, which has imported it once."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._files = folder / "stdout", folder / "stderr"

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `forge words...`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([words, env, *map(str, self._files)]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, err = (file.read_text(encoding="utf-8") for file in self._files)
        return status, out, err

    def check_output(self, *words: str, **env: str) -> str:
        """Standard output of a command that succeeds and complains about nothing."""
        status, out, err = self.run(*words, **env)
        assert (status, err) == (0, "")
        return out

    def check_refusal(self, *words: str, **env: str) -> str:
        """The one line with which a command says no."""
        status, out, err = self.run(*words, **env)
        assert (status, out) == (2, ""), err
        assert err.count("\n") == 1 and err.endswith("\n"), err
        assert "Traceback" not in err
        return err.strip()


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedForge]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        cwd=ROOT,
        env=environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        yield ForkedForge(process, tmp_path_factory.mktemp("forge"))


@contextmanager
def run_server(*words: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server that is ready, and its banner: first word of each line -> the rest."""
    with start_forge("serve", *words, **env) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            banner: dict[str, str] = {}
            while "try" not in banner:
                line = process.stdout.readline()
                assert line, f"the server ends: {process.stderr.read()}"
                name, _, rest = line.strip().partition(" ")
                banner[name] = rest.strip()
            yield process, banner
        finally:
            process.kill()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def write(folder: Path, text: str | bytes) -> str:
    file = folder / "forge.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


# forge --version, forge info


def test_version_is_printed() -> None:
    assert run_forge("--version") == (0, f"forge {__version__}\n", "")


def test_the_file_of_the_entry_point_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "forge" / "cli" / "main.py"), run_name="__main__")
    assert capsys.readouterr().out == f"forge {__version__}\n"


def test_info_prints_versions_device_and_what_would_fit(forge: ForkedForge) -> None:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    words = ("--num-blocks", "300", "--max-model-len", "1000", "--port", "0")
    lines = forge.check_output("info", *words).splitlines()
    assert lines.pop(3).startswith("versions all tested")
    assert lines == [
        f"forge    {__version__}",
        f"python   {sys.version.split()[0]}",
        f"torch    {torch}",
        f"device   cpu, {os.uname().machine}",
        "model    tiny",
        "cache    300 blocks x 16 tokens = 4800 tokens",
        "batch    up to 64 sequences; the cache holds 4.7 of the longest (1000 tokens)",
        "address  127.0.0.1:0",
    ]


def test_info_shows_that_a_port_is_in_use_and_goes_on(forge: ForkedForge) -> None:
    """The process that uses it may be the very server that these options describe."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        shown = forge.check_output("info", "--port", port).splitlines()
    assert shown[-1] == f"address  127.0.0.1:{port}, in use now"


def test_what_fits_counts_whole_blocks_and_rounds_down() -> None:
    """Ten tokens take three blocks of four, so 32 blocks hold ten sequences and two thirds."""
    one = EngineConfig(num_blocks=32, block_size=4, max_model_len=10, max_num_seqs=16)
    assert describe_capacity(one)[1] == (
        "batch    up to 16 sequences; the cache holds 10.6 of the longest (10 tokens)"
    )
    alone = EngineConfig(num_blocks=32, block_size=4, max_model_len=10, max_num_seqs=1)
    assert describe_capacity(alone)[1].startswith("batch    up to 1 sequence; ")


def fake_untested_version(folder: Path) -> dict[str, str]:
    """An environment in which h11 has a version that was not tested, by its metadata."""
    record = folder / "h11-9.0.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: h11\nVersion: 9.0\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.long
def test_info_names_an_installed_version_that_was_not_tested(tmp_path: Path) -> None:
    status, out, err = run_forge("info", "--port", "0", **fake_untested_version(tmp_path))
    (line,) = [line for line in out.splitlines() if line.startswith("versions")]
    assert (status, err) == (0, "")
    assert "h11 9.0 (tested: >=0.16,<0.17)" in line


@pytest.mark.long
def test_a_server_warns_of_an_installed_version_that_was_not_tested(tmp_path: Path) -> None:
    """It starts: here it is refused for another reason right after."""
    status, _, err = run_forge("serve", "--host", "0.0.0.0", **fake_untested_version(tmp_path))
    assert status == 2
    assert "WARNING forge.start: untested version: h11 9.0 (tested: >=0.16,<0.17)" in err


def test_what_fits_says_when_the_longest_sequence_does_not() -> None:
    """128 positions: a sequence of 129 tokens fits, for its last one takes none."""
    long = EngineConfig(num_blocks=32, block_size=4, max_model_len=130)
    assert describe_capacity(long)[1] == (
        "batch    up to 64 sequences; the cache holds 0.9 of the longest (130 tokens), "
        "so max_model_len cannot be reached"
    )
    assert describe_capacity(EngineConfig(num_blocks=32, block_size=4, max_model_len=129))[
        1
    ].endswith("tokens)")


@pytest.mark.long
def test_everything_works_where_docstrings_are_stripped() -> None:
    run = subprocess.run(
        [sys.executable, "-OO", "-m", "forge", "info"],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.long
def test_a_checkpoint_without_what_it_needs_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from forge.cli.main import main; sys.exit(main(['info', 'owner/name']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 2
    assert run.stderr == (
        "forge info: MODEL: a checkpoint needs torch, which is not installed. "
        "In a clone of forge run pip install '.[hf]', or install "
        f"'forge_llm_engine-{__version__}-py3-none-any.whl[hf]'\n"
    )


# forge generate


def test_generate_prints_what_llm_gives(forge: ForkedForge) -> None:
    (output,) = LLM("hash").generate("Once upon a time")
    assert (
        forge.check_output("generate", "Once upon a time", "--model", "hash") == output.text + "\n"
    )


def test_generate_takes_sampling_flags_and_those_of_the_engine(forge: ForkedForge) -> None:
    """--seed is the request's; the engine's has no part in it then."""
    params = SamplingParams(
        max_tokens=60,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        seed=7,
        stop=["q", "no such"],
        ignore_eos=True,
        min_tokens=3,
    )
    (output,) = LLM("hash:seed=3", block_size=4).generate("abc", params)
    words = "--max-tokens=60 --temperature 0.7 --top-p 0.9 --top-k 20 --seed 7 --stop q".split()
    words += ["--stop", "no such", "--ignore-eos", "--min-tokens", "3"]
    words += ["--model", "hash:seed=3", "--block-size", "4", "--depth", "2"]
    assert forge.check_output("generate", "abc", *words) == output.text + "\n"


def test_generate_prints_text_while_it_comes_and_ctrl_c_ends_it() -> None:
    words = ("--model", "hash:step_ms=20", "--max-tokens", "8000", "--ignore-eos")
    with start_forge("generate", "abc", *words) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(5)) == 5
        process.send_signal(signal.SIGINT)
        assert (process.wait(TIMEOUT_S), process.stderr.read()) == (130, "")


def test_generate_ends_quietly_when_its_reader_leaves() -> None:
    words = ("--model", "hash:step_ms=20", "--max-tokens", "8000", "--ignore-eos")
    with start_forge("generate", "abc", *words) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert (process.wait(TIMEOUT_S), process.stderr.read()) == (1, "")


@pytest.mark.long
def test_generate_prints_to_a_terminal_that_does_not_know_every_character() -> None:
    words = ("--model", "hash", "--max-tokens", "300", "--temperature", "2")
    words = (*words, "--ignore-eos", "--seed", "1")
    params = SamplingParams(max_tokens=300, temperature=2.0, ignore_eos=True, seed=1)
    (output,) = LLM("hash").generate("abc", params)
    assert not output.text.isascii(), "this seed shows nothing: take another"
    known = output.text.encode("ascii", "replace").decode()
    assert run_forge("generate", "abc", *words, PYTHONIOENCODING="ascii") == (0, known + "\n", "")


def test_a_policy_that_fails_on_the_way_is_one_line_and_status_1(
    forge: ForkedForge, tmp_path: Path
) -> None:
    file = tmp_path / "nobody.py"
    file.write_text(
        "from forge.policy import FCFS\npolicy = FCFS._replace(admit=lambda w, context: None)\n"
    )
    status, out, err = forge.run("generate", "abc", "--policy", str(file))
    assert (status, out) == (1, "")
    assert re.fullmatch(r"forge generate: 1 requests wait, .*\n", err)


# forge bench


# Puts stubs in place of the benchmarks named. A stub prints its arguments. Then runs each line
# of words as a command, and prints the exit status after its output.
STUBBED_COMMANDS = """
import json, sys, types
import forge.bench
from forge.cli.main import main

def create_stub(name):
    def stub(*args, **kwargs):
        print(name, *args, *kwargs)
        return 1 if name == "policy" and args[-1] else 0

    module = sys.modules[f"forge.bench.{name}"] = types.ModuleType(name)
    module.main = stub
    setattr(forge.bench, name, module)

for name in sys.argv[1:]:
    create_stub(name)
for line in sys.stdin:
    print(main(json.loads(line)), flush=True)
"""
STUBBED = (
    *("policy", "step", "breakdown", "ttft", "sweep", "serve", "agents", "spec", "pairs", "soak"),
    *("kv_returning", "kv_overhead", "kv_memory", "kv_moves"),
)


@pytest.fixture
def run_stubs(tmp_path: Path) -> Callable[..., list[str]]:
    """Run commands with stubs for benchmarks; return the stubs' arguments and exit statuses."""

    def run(*commands: str, **env: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", STUBBED_COMMANDS, *STUBBED],
            cwd=tmp_path,
            env=environment({"PYTHONPATH": str(ROOT), **env}),
            input="".join(json.dumps(["bench", *words.split()]) + "\n" for words in commands),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        return [f"{args} -> {status}" for args, status in zip(lines[::2], lines[1::2], strict=True)]

    return run


@pytest.mark.long
def test_bench_hands_its_flags_to_the_benchmark(
    run_stubs: Callable[..., list[str]], tmp_path: Path
) -> None:
    file = str(tmp_path / "made" / "figures.json")
    at = "http://127.0.0.1:1"
    expected = {
        "policy": "policy None False -> 0",
        f"policy --json {file} --check": f"policy {file} True -> 1",
        "step hash": "step hash None () None {} -> 0",
        f"step qwen3-4b --cells c1,b64 --repeats 2 --json {file} --depth 1 --device cpu": (
            f"step qwen3-4b {file} ('c1', 'b64') 2 {{'depth': 1, 'device': 'cpu'}} -> 0"
        ),
        "step hash --profile": "breakdown hash None (1, 64) {} -> 0",
        "step hash --profile --cells b8 --enforce-eager": (
            "breakdown hash None (8,) {'enforce_eager': True} -> 0"
        ),
        "ttft hash --cells ttft_128 --gpu-memory-utilization 0.5": (
            "ttft hash None ('ttft_128',) None {'gpu_memory_utilization': 0.5} -> 0"
        ),
        "sweep hash": "sweep hash None () {} -> 0",
        "sweep hash --concurrency 1,8 --block-size 4": (
            "sweep hash None (1, 8) {'block_size': 4} -> 0"
        ),
        f"serve {at}": f"serve {at} None forge () None None None -> 0",
        f"serve {at} --label a --concurrency 2 --model b --vocab-size 9 --api-key c": (
            f"serve {at} None a (2,) b 9 c -> 0"
        ),
        f"agents {at} --agents 2 --turns 3 --hints sessions --answers returned --label a": (
            f"agents {at} None AgentLoad(agents=2, sessions=128, turns=3, system=8192, "
            "new='exp:2000', output='exp:300', pause=3.0, max_len=None, seed=0) "
            "sessions returned a None None None -> 0"
        ),
        "spec": "spec hash:step_ms=5 None () None None 0.8 3 {} -> 0",
        "spec tiny --streams 1,8 --prompt-tokens 9 --output-tokens 50 --agreement 0.5 --repeats 2"
        " --speculative-model a --num-speculative-tokens 2": (
            "spec tiny None (1, 8) 9 50 0.5 2 "
            "{'draft_model': 'a', 'num_speculative_tokens': 2} -> 0"
        ),
        "pairs hash": "pairs hash None 32 64 {} -> 0",
        "pairs hash --requests 3 --tokens 5 --seed 7": "pairs hash None 3 5 {'seed': 7} -> 0",
        "soak hash": "soak hash None 10000 {} -> 0",
        "soak hash --requests 3": "soak hash None 3 {} -> 0",
        "kv returning hash": "kv_returning hash None () () 5 None {} -> 0",
        "kv returning hash --lengths 64,128 --file-lengths 64 --repeats 7 --kv-host-gib 2": (
            "kv_returning hash None (64, 128) (64,) 7 None {'kv_host_gib': 2.0} -> 0"
        ),
        "kv overhead hash --rounds 2 --block-size 4": (
            "kv_overhead hash None 2 {'block_size': 4} -> 0"
        ),
        "kv memory --shapes qwen3-4b,qwen3-8b": (
            "kv_memory ['qwen3-4b', 'qwen3-8b'] cpu None -> 0"
        ),
        f"kv moves --num-blocks 9 --json {file}": (
            f"kv_moves ['qwen3-4b', 'qwen3-0.6b'] 9 {file} -> 0"
        ),
    }
    assert run_stubs(*expected) == list(expected.values())


def test_bench_reads_only_the_key_of_a_server_from_the_environment(
    run_stubs: Callable[..., list[str]],
) -> None:
    env = {"FORGE_NUM_BLOCKS": "8", "FORGE_MODEL": "other", "FORGE_API_KEY": "sesame"}
    assert run_stubs("step hash", "serve http://a", **env) == [
        "step hash None () None {} -> 0",
        "serve http://a None forge () None None sesame -> 0",
    ]


def test_help_does_not_load_the_benchmarks() -> None:
    program = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from forge.cli.main import main\n"
        "with suppress(SystemExit): main(['--help'])\n"
        "sys.exit('forge.bench' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=TIMEOUT_S)
    assert run.returncode == 0


# forge serve


def test_a_server_says_it_is_ready_answers_and_stops_on_sigterm() -> None:
    with run_server("--port", "0", "--num-blocks", "256", "--max-num-seqs", "8") as (
        process,
        banner,
    ):
        assert banner["forge"] == f"{__version__} is ready"
        assert banner["model"] == "tiny"
        assert banner["cache"] == "256 blocks x 16 tokens = 4096 tokens"
        assert banner["batch"].startswith("up to 8 sequences; the cache holds 4.0 of the longest")
        health = get(banner["address"] + "/healthz")
        assert health["status"] == "ok"
        assert health["kv_blocks_total"] == 256
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        log = process.stderr.read()
        assert unexpected_log(log) == ""
        assert re.search(r"ready \S+ s after the process started: imports .* engine .* server", log)


@pytest.mark.long
def test_forge_addr_is_where_a_server_listens_and_ctrl_c_ends_it_well() -> None:
    with run_server(FORGE_ADDR="127.0.0.1:0") as (process, banner):
        assert get(banner["address"] + "/healthz")["status"] == "ok"
        assert not banner["address"].endswith(":8080")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None and unexpected_log(process.stderr.read()) == ""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_line_of_the_banner_works_and_does_not_show_the_key() -> None:
    name = 'it\'s "mine"'
    with run_server("--port=0", "--served-model-name", name, FORGE_API_KEY="sesame") as (_, banner):
        assert "sesame" not in "".join(banner.values())
        run = subprocess.run(
            ["bash", "-c", f"{banner['try']} --silent --show-error"],
            env=environment({"FORGE_API_KEY": "sesame"}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert run.stderr == ""
    answer = json.loads(run.stdout)
    assert answer["model"] == name
    assert answer["usage"]["completion_tokens"] > 0


def test_the_banner_of_a_server_with_several_keys_uses_the_first_of_the_variable() -> None:
    shown = format_banner(EngineConfig(), "hash", "http://127.0.0.1:80", ("sesame", "poppy"))
    assert "sesame" not in shown and "poppy" not in shown
    words = shlex.split(shown.splitlines()[-1])[-1]
    printed = subprocess.run(
        ["bash", "-c", f'echo "{words}"'],
        env={"FORGE_API_KEY": "sesame, poppy"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert printed.stdout == "authorization: Bearer sesame\n"


def test_the_banner_of_a_server_on_on_all_addresses_shows_one_to_call() -> None:
    shown = format_banner(EngineConfig(), "hash", "http://0.0.0.0:80", ("sesame",)).splitlines()
    assert shown[-2] == "address  http://0.0.0.0:80"
    assert shown[-1].startswith("try      curl http://127.0.0.1:80/v1/completions ")


def test_a_busy_port_is_refused_before_the_model_is_loaded(forge: ForkedForge) -> None:
    """P24, it starts or fails clearly. There is no such model, and loading it would say so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert forge.check_refusal("serve", "nonesuch", "--port", port) == (
            f"forge serve: --port: {port} is in use. "
            "Stop the program that uses it, or give another --port"
        )


# Precedence: flag, environment, file, default.


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    forge: ForkedForge, tmp_path: Path
) -> None:
    file = write(tmp_path, "num_blocks: 33\nmax_num_seqs: 5\n")

    def blocks(*words: str, **env: str) -> str:
        (found,) = re.findall(r"cache    (\d+) blocks", forge.check_output("info", *words, **env))
        return str(found)

    assert blocks("--num-blocks", "11", "--config", file, FORGE_NUM_BLOCKS="22") == "11"
    assert blocks("--config", file, FORGE_NUM_BLOCKS="22") == "22"
    assert blocks("--config", file) == "33"
    assert blocks() == "1024"


SAMPLES: dict[type, tuple[Any, Any, Any]] = {
    bool: (True, False, True),
    int: (11, 22, 33),
    float: (0.1, 0.2, 0.3),
    str: ("one", "two", "three"),
    tuple: (("one",), ("two", "three"), ("four", "five")),
}


@pytest.mark.parametrize("each", SERVE_OPTIONS, ids=lambda each: each.name)
def test_every_option_is_read_from_four_places_in_order(each: Option, tmp_path: Path) -> None:
    by_flag, by_environment, by_file = SAMPLES[each.value_type]
    is_list = each.value_type is tuple
    flags = {each.name: list(by_flag) if is_list else str(by_flag)}
    text = ", ".join(by_environment) if is_list else str(by_environment)
    environ = {each.env_var: "two:22" if each.env_var == ADDRESS_VARIABLE else text}
    file = {
        "config": write(tmp_path, f"{each.file_key}: {list(by_file) if is_list else by_file}\n")
    }

    def value(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
        return resolve_settings(SERVE_OPTIONS, flags, environ).values[each.name]

    assert value(flags | file, environ) == by_flag
    assert value(file, environ) == by_environment
    assert value(file, {}) == by_file
    assert value({}, {}) == each.default


def test_options_of_an_engine_are_those_of_llm() -> None:
    assert [each.name for each in ENGINE_OPTIONS] == list(Options.__annotations__)


def test_the_geometry_has_no_default_but_the_models() -> None:
    """An option that is not given is not passed on: each model has its own default."""
    unset = [each.name for each in ENGINE_OPTIONS if each.default_text]
    spoken = ["num_speculative_tokens", "speculative_method", "acceptance"]
    assert unset == [*MAX_GEOMETRY, "depth", "max_step_ms", *spoken]
    defaults = asdict(EngineConfig()) | asdict(DeviceOptions())
    defaults |= asdict(TierOptions()) | asdict(KVEventOptions())
    defaults |= {"draft_model": None, "record": None}
    for each in ENGINE_OPTIONS:
        assert each.default == (None if each.default_text else defaults[each.name])
    speculation = asdict(Speculation())
    for each in SPECULATIVE_OPTIONS[1:]:
        assert each.default_text == str(speculation[SPECULATION_OPTIONS[each.name]])
    assert read_given({"FORGE_NUM_BLOCKS": "8", "FORGE_DEVICE": "cpu"}) == {"num_blocks", "device"}


def test_a_file_may_give_a_whole_number_where_a_number_is_taken(tmp_path: Path) -> None:
    file = write(tmp_path, "gpu_memory_utilization: 1\n")
    value = resolve_settings(SERVE_OPTIONS, {"config": file}, {}).values["gpu_memory_utilization"]
    assert (type(value), value) == (float, 1.0)


def test_every_option_has_a_kind_and_a_help() -> None:
    for each in (*SERVE_OPTIONS, *SAMPLING_OPTIONS):
        assert each.value_type in TYPE_NAMES
        assert each.help
        assert each.default is None or type(each.default) is each.value_type


def read_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    return resolve_settings(SERVE_OPTIONS, {}, environ).values


def read_given(environ: Mapping[str, str]) -> frozenset[str]:
    return resolve_settings(SERVE_OPTIONS, {}, environ).explicit


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("example.org:80", "example.org", 80),
        ("[::1]:8080", "::1", 8080),
    ],
)
def test_forge_addr_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    values = read_settings({"FORGE_ADDR": text})
    assert (values["host"], values["port"]) == (host, port)


def test_a_flag_replaces_one_half_of_forge_addr() -> None:
    values = resolve_settings(SERVE_OPTIONS, {"port": "1"}, {"FORGE_ADDR": "10.0.0.1:2"}).values
    assert (values["host"], values["port"]) == ("10.0.0.1", 1)


def test_forge_port_is_left_to_kubernetes() -> None:
    assert read_settings({"FORGE_PORT": "tcp://10.0.0.1:80", "FORGE_HOST": "x"})["port"] == 8080


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("YES", True), ("False", False), ("0", False), ("no", False)],
)
def test_true_and_false_have_words_in_the_environment(text: str, value: bool) -> None:
    assert read_settings({"FORGE_ENABLE_PREFIX_CACHING": text})["enable_prefix_caching"] is value


def test_a_flag_may_say_no(forge: ForkedForge) -> None:
    flags = {"enable_prefix_caching": "0"}
    assert resolve_settings(SERVE_OPTIONS, flags, {}).values["enable_prefix_caching"] is False
    forge.check_output("info", "--no-enable-prefix-caching")
    forge.check_output("info", "--enable-prefix-caching")


def test_a_variable_that_is_empty_counts_as_not_set() -> None:
    assert read_settings({"FORGE_API_KEY": "", "FORGE_NUM_BLOCKS": ""}) == read_settings({})


def test_a_file_may_hold_options_that_a_command_does_not_take(
    forge: ForkedForge, tmp_path: Path
) -> None:
    file = write(tmp_path, "port: 1\napi_key: sesame\nmodel: hash:seed=3\n")
    (output,) = LLM("hash:seed=3").generate("abc")
    assert forge.check_output("generate", "abc", "--config", file) == output.text + "\n"


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "# nothing yet\n")
    assert resolve_settings(SERVE_OPTIONS, {"config": file}, {}).values == read_settings({})


# What is refused: exit status 2, one line that says what to change.


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("", "forge: the following arguments are required: COMMAND. See forge --help"),
        ("serve --port", "forge serve: argument --port: expected one argument. See forge serve -"),
        (
            "serve --max-seqs 8",
            "forge serve: there is no option --max-seqs. The nearest is --max-n",
        ),
        ("serve --max-num 8", "forge serve: there is no option --max-num. The nearest is --max-n"),
        ("serve --zzz=8", "forge serve: there is no option --zzz. See forge serve --help"),
        (
            "serve --chat-template=a.jinja",
            "forge serve: there is no option --chat-template. Write it to chat_template.jinja in ",
        ),
        ("info --no-enable-lora", "forge info: there is no option --no-enable-lora. Leave it out"),
        ("info -tp 2", "forge info: there is no option -tp. Give --tensor-parallel-size. See "),
        ("serve hash b", "forge serve: 'b' is one argument too many. See forge serve --help"),
        ("serve nonesuch", "forge serve: MODEL: 'nonesuch' is not a model this build serves. Use "),
        ("serve hash:seed=x", "forge serve: MODEL: hash:seed='x' is not a number. Give seed=1"),
        ("serve --port 80x", "forge serve: --port: '80x' is not an integer. Give a whole number"),
        ("serve --port 99999", "forge serve: --port: 99999 is no port. Give 0 to 65535"),
        ("serve --host a..b", "forge serve: --host: 'a..b' is no address of a machine. Give 127.0"),
        ("serve --host 0.0.0.0", "forge serve: --host: 0.0.0.0 can be reached from other machines"),
        ("serve --api-key=", "forge serve: --api-key: it is empty. Give text, or leave it out"),
        (
            "info --api-key a --api-key b,c",
            "forge info: --api-key: it has a comma. Give each text separately, without commas",
        ),
        ("serve --depth 3", "forge serve: --depth: 3 is not supported. Give 1 or 2"),
        ("serve --num-blocks 0", "forge serve: --num-blocks: 0 is not a positive integer. Give 1"),
        ("serve --num-blocks 99999999999999", "forge serve: --num-blocks: 99999999999999 is more"),
        (
            "serve hash --max-num-seqs 4096",
            "forge serve: --max-num-batched-tokens: 2048 is less than ",
        ),
        (
            "info hash --dtype int8",
            "forge info: --dtype: the model hash does not accept it. Leave ",
        ),
        (
            "info --gpu-memory-utilization x",
            "forge info: --gpu-memory-utilization: 'x' is not a ",
        ),
        (
            "generate a --enforce-eager --model hash",
            "forge generate: --enforce-eager: the model hash does not ",
        ),
        (
            "generate a --enforce-eager",
            "forge generate: --enforce-eager: the model tiny is computed in numpy, in float32 on ",
        ),
        ("info --dtype int8", "forge info: --dtype: 'int8' is not known. Give one of: auto, fl"),
        ("info --max-model-len 1025", "forge info: --max-model-len: 1025 is more than the 1024 p"),
        (
            "info --speculative-model hash",
            "forge info: --speculative-model: 'hash' cannot draft for tiny. Use tiny-draft",
        ),
        ("serve --policy nonesuch", "forge serve: --policy: 'nonesuch' is not known. Use fcfs, "),
        ("serve --policy none.py", "forge serve: --policy: there is no file 'none.py'. Use fcfs, "),
        ("serve --config none.yaml", "forge serve: --config: 'none.yaml' cannot be read: No such "),
        ("serve --config .", "forge serve: --config: '.' cannot be read: Is a directory. Name a "),
        ("info --port 99999", "forge info: --port: 99999 is no port. Give 0 to 65535"),
        ("info --host 0.0.0.0", "forge info: --host: 0.0.0.0 can be reached from other machines"),
        ("info --seed 1.5", "forge info: --seed: '1.5' is not an integer. Give a whole number"),
        ("generate", "forge generate: the following arguments are required: prompt. See forge "),
        ("generate a b", "forge generate: 'b' is one argument too many. See forge generate --help"),
        ("generate a --model x", "forge generate: --model: 'x' is not a model this build serves"),
        ("generate a --top-p 2", "forge generate: --top-p: 2.0 is not a number from 0 to 1. "),
        ("generate a --top-k x", "forge generate: --top-k: 'x' is not an integer. Give a whole "),
        ("generate a --seed 1e3", "forge generate: --seed: '1e3' is not an integer. Give a whole "),
        ("generate a --stop=", "forge generate: --stop: '' is not a non-empty string"),
        ("generate a --max-tokens 9000", "forge generate: --max-tokens: Input tokens exceed the "),
        ("generate a --num-blocks=1 --max-tokens=99", "forge generate: --max-tokens: 1 prompt to"),
        ("generate a --port 1", "forge generate: there is no option --port"),
        (
            "generate a --temp 1",
            "forge generate: there is no option --temp. The nearest is --temperature. See ",
        ),
        (
            "generate a --stop-token x",
            "forge generate: there is no option --stop-token. The nearest is --stop. See ",
        ),
        ("bench", "forge bench: the following arguments are required: BENCHMARK. See "),
        ("bench policy --json /dev/null/x", "forge bench policy: --json: '/dev/null/x' cannot be "),
        ("bench policy --cells b1", "forge bench policy: there is no option --cells"),
        ("bench step", "forge bench step: the following arguments are required: MODEL. See "),
        ("bench kv", "forge bench kv: the following arguments are required: PART. See "),
        (
            "bench kv memory --shapes a",
            "forge bench kv memory: --shapes: there is no shape 'a'. ",
        ),
        (
            "bench kv memory --device tpu",
            "forge bench kv memory: --device: 'tpu' is not known. ",
        ),
        pytest.param(
            "bench kv moves",
            "forge bench kv moves: --shapes: keys and values of a model need torch, which is not ",
            marks=pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed"),
        ),
        ("bench step nonesuch", "forge bench step: MODEL: 'nonesuch' is not a model this build "),
        ("bench step hash --cells c9", "forge bench step: --cells: there is no cell 'c9'. Use "),
        ("bench step hash --repeats 0", "forge bench step: --repeats: 0 is not a positive integer"),
        ("bench step hash --depth 3", "forge bench step: --depth: 3 is not supported. Give 1 or 2"),
        ("bench step hash --dtype auto", "forge bench step: --dtype: the model hash does not "),
        ("bench step hash --depht 2", "forge bench step: there is no option --depht. The nearest "),
        ("bench step hash --profile --cells c1", "forge bench step: --cells: 'c1' has no single "),
        ("bench step hash --profile --repeats 2", "forge bench step: --repeats: a profile has no "),
        ("bench ttft hash --repeats x", "forge bench ttft: --repeats: 'x' is not an integer. "),
        (
            "bench sweep hash --concurrency 1,0",
            "forge bench sweep: --concurrency: '1,0' is not a list of numbers. Give 1,8,64, say",
        ),
        ("bench serve nowhere", "forge bench serve: URL: 'nowhere' is not the address of a server"),
        ("bench serve x --vocab-size 0", "forge bench serve: --vocab-size: 0 is not a positive "),
        ("bench agents http://a --turns 0", "forge bench agents: --turns: 0 is not from 1 to "),
        ("bench pairs hash --requests 1", "forge bench pairs: --requests: one alone cannot be "),
        ("bench soak hash --requests=-1", "forge bench soak: --requests: -1 is not a positive "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(forge: ForkedForge, command: str, line: str) -> None:
    """P24, it starts or fails clearly."""
    assert forge.check_refusal(*command.split()).startswith(line)


@pytest.mark.parametrize("command", ["frobnicate", "bench frobnicate"])
def test_an_unknown_command_is_refused_with_the_known_ones(
    forge: ForkedForge, command: str
) -> None:
    line = forge.check_refusal(*command.split())
    assert "invalid choice: 'frobnicate' (choose from " in line
    assert line.endswith("--help")


def test_an_empty_prompt_is_refused(forge: ForkedForge) -> None:
    assert forge.check_refusal("generate", "") == (
        "forge generate: prompt: it is empty. Give at least one token"
    )


def test_a_prompt_that_is_no_text_is_refused() -> None:
    status, out, err = run_forge("generate", b"\xff")
    assert (status, out) == (2, "")
    assert re.fullmatch("forge generate: prompt: it has half a surrogate pair, .*\n", err)


def test_a_policy_file_that_does_not_run_is_refused(forge: ForkedForge, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("policy = = 1\n")
    assert forge.check_refusal("serve", "--policy", str(file)).startswith(
        f"forge serve: --policy: {file}:1 does not run: SyntaxError: invalid syntax. Fix the policy"
    )
    file.write_text("import math\n\nmath.sqrt(-1)\n")
    assert forge.check_refusal("serve", "--policy", str(file)).startswith(
        f"forge serve: --policy: {file}:3 does not run: ValueError: "
    )


def test_a_refusal_stays_one_line_whatever_was_given(forge: ForkedForge) -> None:
    assert forge.check_refusal("serve", "--policy", "a\nb\x0cc").startswith("forge serve: ")
    assert forge.check_refusal("serve", "--host", "x\ny").startswith("forge serve: ")
    assert forge.check_refusal("serve", "a\nb", "c\nd").startswith("forge serve: ")
    assert forge.check_refusal("serve", "--a\nb").startswith(
        "forge serve: there is no option --a b"
    )


@pytest.mark.parametrize(
    ("variable", "text", "line"),
    [
        ("FORGE_NUM_BLOCKS", "many", "FORGE_NUM_BLOCKS: 'many' is not an integer. Give a whole "),
        ("FORGE_NUM_BLOCKS", "0", "FORGE_NUM_BLOCKS: 0 is not a positive integer. Give 1 or more"),
        ("FORGE_ENABLE_PREFIX_CACHING", "on?", "FORGE_ENABLE_PREFIX_CACHING: 'on?' is not true or"),
        ("FORGE_MODEL", "nonesuch", "FORGE_MODEL: 'nonesuch' is not a model this build serves"),
        ("FORGE_DEVICE", "cuda", "FORGE_DEVICE: the model tiny is computed in numpy, in float32"),
        ("FORGE_API_KEY", "a,,b", "FORGE_API_KEY: it is empty. Give text, or leave it out"),
        ("FORGE_ADDR", "8080", "FORGE_ADDR: '8080' is not HOST:PORT. Give 127.0.0.1:8080, say"),
        ("FORGE_ADDR", ":8080", "FORGE_ADDR: ':8080' is not HOST:PORT"),
        ("FORGE_ADDR", "localhost:", "FORGE_ADDR: 'localhost:' is not HOST:PORT"),
        ("FORGE_ADDR", "localhost:http", "FORGE_ADDR: 'http' is not an integer"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(
    forge: ForkedForge, variable: str, text: str, line: str
) -> None:
    assert forge.check_refusal("info", **{variable: text}).startswith(f"forge info: {line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("num_blocks: many", "num_blocks in {}: 'many' is not an integer. Give a whole number"),
        ("num_blocks: 8.0", "num_blocks in {}: '8.0' is not an integer. Give a whole number"),
        ("num_blocks: true", "num_blocks in {}: 'True' is not an integer. Give a whole number"),
        ("num_blocks:", "num_blocks in {}: 'None' is not an integer. Give a whole number"),
        ("num_blocks: 0", "num_blocks in {}: 0 is not a positive integer. Give 1 or more"),
        ("api_key: 1234", "api_key in {}: '1234' is not text. Give text, in quotes in a file"),
        (
            f"gpu_memory_utilization: 1{'0' * 400}",
            "gpu_memory_utilization in {}: '1000000000000000000000000000000000000000000000000000",
        ),
        ("api_key: ''", "api_key in {}: it is empty. Give text, or leave it out"),
        ("api_key: []", "api_key in {}: '[]' is not text. Give text, in quotes in a file"),
        ("api_key: [a, 1]", "api_key in {}: '1' is not text. Give text, in quotes in a file"),
        ("api_key: ['a,b']", "api_key in {}: it has a comma. Give each text separately, without"),
        ("enable_prefix_caching: 1", "enable_prefix_caching in {}: '1' is not true or false."),
        ("max-num-seqs: 8", "max-num-seqs in {}: there is no such option. Use max_num_seqs"),
        ("model_len: 8", "model_len in {}: there is no such option. Use max_model_len"),
        ("max_num: 8", "max_num in {}: there is no such option. Use max_num_seqs"),
        (
            "top-p: 0.9",
            "top-p in {}: sampling is set by flags of forge generate only. Give --top-p",
        ),
        ("stop: a", "stop in {}: sampling is set by flags of forge generate only. Give --stop"),
        ("swap_space: 8", "swap_space in {}: there is no such option. Give --kv-host-gib"),
        ("zzz: 8", "zzz in {}: there is no such option. Use model, host, port, api_key, "),
        ("8: 8", "8 in {}: there is no such option. Use model, host, "),
        (
            "num_blocks: 8\nblock_size: 4\n'num_blocks': 9",
            "num_blocks in {}: it is on line 1 and on line 3. Keep one of them",
        ),
        ("num_blocks: 8\nnum_blocks: 8", "num_blocks in {}: it is on line 1 and on line 2. Keep"),
        ("[num_blocks, 8]", "--config: '{}' holds no options. Write lines such as max_num_seqs: 8"),
        ("a: b\na: b: c", "--config: '{}' line 2 is not YAML. Fix it"),
        (b"\xff\xfe\xfa", "--config: '{}' is not YAML. Fix it"),
        ("!!python/object/apply:os.getcwd []", "--config: '{}' line 1 is not YAML. Fix it"),
    ],
    ids=str,
)
def test_a_bad_file_is_refused_by_its_name(
    forge: ForkedForge, tmp_path: Path, text: str | bytes, line: str
) -> None:
    file = write(tmp_path, text)
    shown = forge.check_refusal("info", "--config", file)
    assert shown.startswith(f"forge info: {line.format(file)}")


def test_of_options_that_begin_as_an_unknown_key_the_nearest_alone_is_named(
    forge: ForkedForge, tmp_path: Path
) -> None:
    """`max_num_seqs` and `max_num_batched_tokens` both begin as it does."""
    line = forge.check_refusal("info", "--config", write(tmp_path, "max_num: 8"))
    assert line.endswith("there is no such option. Use max_num_seqs")


def test_a_file_whose_name_has_two_lines_is_refused_in_one(
    forge: ForkedForge, tmp_path: Path
) -> None:
    file = tmp_path / "a\nb.yaml"
    file.write_text("zzz: 8\n")
    line = forge.check_refusal("info", "--config", str(file))
    assert f"zzz in {tmp_path}/a b.yaml: there is no such option" in line


# The page about it.


def format_cells(*texts: str) -> str:
    """One row of a table."""
    return (
        "|"
        + "|".join(f" {text.replace('|', chr(92) + '|')} " if text else " " for text in texts)
        + "|"
    )


def format_flag(each: Option) -> str:
    if each.name == "model":
        return "`MODEL`"
    if each.value_type is bool:
        return f"`{each.flag}, --no-{each.flag[2:]}`"
    return f"`{each.flag} {each.metavar}`"


def format_default(each: Option) -> str:
    return each.default_text if each.default is None else f"`{str(each.default).lower()}`"


def parse_tables(page: Path) -> list[list[str]]:
    """The rows of each table, without its head."""
    text = page.read_text(encoding="utf-8")
    whole = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [table.splitlines() for table in whole]


def test_what_is_proposed_is_said() -> None:
    speculation = Speculation(num_tokens=3, acceptance="rejection")
    assert describe_capacity(EngineConfig(speculation=speculation))[2:] == [
        "drafts   up to 3 a step, rejection"
    ]
    assert len(describe_capacity(EngineConfig())) == 2


def test_tiers_are_described_where_there_are_some() -> None:
    tier = HostTier(num_blocks=64, disk=DiskTier(max_files=500))
    assert describe_capacity(EngineConfig(host_tier=tier))[1:3] == [
        "host     64 blocks x 16 tokens = 1024 tokens",
        "disk     up to 500 files of a block",
    ]
    without_files = EngineConfig(host_tier=HostTier(num_blocks=64))
    assert [line[:4] for line in describe_capacity(without_files)] == ["cach", "host", "batc"]


def test_the_page_has_a_row_for_every_option() -> None:
    assert parse_tables(PAGE)[0] == [
        format_cells(
            format_flag(each),
            f"`{each.env_var}`",
            f"`{each.file_key}`",
            format_default(each),
            each.help,
        )
        for each in SERVE_OPTIONS
    ]


def test_the_page_lists_the_options_of_vllm_that_forge_lacks() -> None:
    assert parse_tables(PAGE)[-1] == [
        format_cells(", ".join(f"`{name}`" for name in names), remedy)
        for names, remedy in VLLM_OPTIONS.items()
    ]


def test_an_option_of_vllm_is_listed_once_and_its_remedy_names_options_of_forge() -> None:
    names = [name for group in VLLM_OPTIONS for name in group]
    flags = {each.flag for each in SERVE_OPTIONS[1:]}  # MODEL is a flag of forge generate only
    assert len(names) == len(set(names))
    assert set(names) & flags == set()
    assert set(re.findall(r"--[\w-]+", " ".join(VLLM_OPTIONS.values()))) <= flags


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("--no-async-scheduling", "Give --depth 1"),
        ("no_enable_lora", "Leave it out: it is off"),
        ("--no-enable-chunked-prefill", "Leave it out: prompts are always in chunks"),
        ("-O3", "Leave it out, or give --torch-compile"),
        ("--no-such-thing", None),
    ],
)
def test_the_negation_of_an_option_of_vllm_has_a_remedy_of_its_own(
    name: str, remedy: str | None
) -> None:
    found = vllm_remedy(name)
    assert found is None if remedy is None else found and found.startswith(remedy)


def test_the_page_shows_the_geometry_of_hash() -> None:
    cells = [row.split(" | ") for row in parse_tables(PAGE)[1]]
    shown = [[name, of_hash] for name, _, of_hash, *_ in cells]
    defaults = asdict(EngineConfig())
    assert shown == [[f"| `{name}`", str(defaults[name])] for name in (*MAX_GEOMETRY, "depth")]


BOUNDS = {
    "max_tokens": "0 or more",
    "temperature": "0 to 2",
    "top_p": "above 0 to 1",
    "top_k": "-1 or more",
    "min_p": "0 to 1",
    "seed": "64 bits",
    "min_tokens": "0 to `--max-tokens`",
    "repetition_penalty": "0.01 to 10",
    "presence_penalty": "-2 to 2",
    "frequency_penalty": "-2 to 2",
    "ignore_eos": "",
}


def test_the_page_has_a_row_for_every_sampling_flag() -> None:
    assert parse_tables(PAGE)[2] == [
        format_cells(format_flag(each), BOUNDS[each.name], format_default(each), each.help)
        for each in SAMPLING_OPTIONS
    ]


@pytest.mark.parametrize("name", [name for name, text in BOUNDS.items() if text])
def test_a_sampling_flag_takes_what_lies_in_its_bounds_and_no_more(name: str) -> None:
    def taken(value: float) -> bool:
        fields: dict[str, Any] = {name: value}
        try:
            SamplingParams(**fields)
        except InvalidRequest as error:
            assert error.field == name
            return False
        return True

    text = BOUNDS[name].replace("`--max-tokens`", str(SamplingParams().max_tokens))
    text = text.replace("64 bits", f"{-(2**63)} to {2**63 - 1}")
    bounds = re.fullmatch(r"(above )?(\S+) (?:or more|to (\S+))", text)
    assert bounds is not None
    open_, low, high = bounds.groups()
    kind = next(each.value_type for each in SAMPLING_OPTIONS if each.name == name)
    past = 1 if kind is int else 1e-9
    assert taken(kind(low)) is (open_ is None)
    assert not taken(kind(low) - past)
    assert taken(kind(low) + past)
    if high is not None:
        assert taken(kind(high))
        assert not taken(kind(high) + past)


@pytest.mark.parametrize(
    ("command", "table", "others"),
    [
        ("serve", SERVE_OPTIONS, {"--help", "--config"}),
        ("info", SERVE_OPTIONS, {"--help", "--config"}),
        (
            "generate",
            (*SERVE_OPTIONS[:1], *ENGINE_OPTIONS, *SERVE_OPTIONS[-1:], *SAMPLING_OPTIONS),
            {"--help", "--config", "--stop"},
        ),
    ],
)
def test_a_command_takes_the_flags_of_the_page_and_no_others(
    forge: ForkedForge, command: str, table: tuple[Option, ...], others: set[str]
) -> None:
    usage = forge.check_output(command, "--help").partition("\n\n")[0]
    documented = set(re.findall(r"--[\w-]+", " ".join(map(format_flag, table))))
    if command == "generate":
        documented.add("--model")
    assert set(re.findall(r"--[\w-]+", usage)) | {"--help"} == documented | others
    assert ("[MODEL]" in usage) is (command != "generate")


@pytest.mark.long
def test_the_page_has_a_row_for_every_benchmark_with_its_flags(forge: ForkedForge) -> None:
    rows = [re.findall(r"`([^`]*)`", row)[:2] for row in parse_tables(PAGE)[3]]
    names = re.findall(r"^    (\w+) ", forge.check_output("bench", "--help"), re.MULTILINE)
    # A benchmark with parts has a row for each of them.
    assert list(dict.fromkeys(head.split()[2] for head, _ in rows)) == names
    parts = re.findall(r"^    (\w+)\s", forge.check_output("bench", "kv", "--help"), re.MULTILINE)
    assert [head.split()[3] for head, _ in rows if head.startswith("forge bench kv")] == parts
    engine = set(re.findall(r"--[\w-]+", " ".join(map(format_flag, ENGINE_OPTIONS))))
    for head, flags in rows:
        _, *words = head.split()
        subject = [word for word in words if not word.islower()]
        usage = forge.check_output(*words[: len(words) - len(subject)], "--help")
        usage = usage.partition("\n\n")[0]
        taken = set(re.findall(r"--[\w-]+", usage)) - {"--json"}
        modelled = subject in (["MODEL"], ["[MODEL]"])
        assert set(flags.split()) == taken - (engine if modelled else set())
        assert engine <= taken or not modelled
        assert usage.split()[-1:] == subject or (not subject and usage.endswith("]"))
