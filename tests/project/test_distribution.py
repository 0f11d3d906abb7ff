"""The built wheel, and what its command does where another distribution has a package `run_forge`
too.

The wheels are real: ours is built from this folder, the other is written by hand. A wheel without
compiled code is installed by unpacking it, which is what pip does, so the order of two installs is
the order of two calls here.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from forge.version import DISTRIBUTION, VERSION, install_remedy
from forge_llm_engine import DISTRIBUTION_NAME, find_conflict

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60
RUN = "import sys; from forge_llm_engine import main; sys.exit(main())"

pytestmark = pytest.mark.skipif(
    find_spec("hatchling") is None, reason="wheels are built by hatchling, which is not installed"
)


@pytest.fixture(scope="module")
def forge_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this folder."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def other_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of another distribution whose package is called forge, with an engine of its own."""
    wheel = tmp_path_factory.mktemp("other") / "forge_infer-0.3.0-py3-none-any.whl"
    files = {
        "forge/__init__.py": "VERSION = 'theirs'\n",
        "forge/engine.py": "",
        "forge_infer-0.3.0.dist-info/METADATA": "Name: forge-infer\nVersion: 0.3.0\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, "forge_infer-0.3.0.dist-info/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("forge_infer-0.3.0.dist-info/RECORD", record)
    return wheel


def install(folder: Path, *wheels: Path) -> Path:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def run_forge(*path: Path, program: str = RUN) -> subprocess.CompletedProcess[str]:
    """`forge --version` with these folders on the path, before what else is installed."""
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "--version"],
        env={"PYTHONPATH": ":".join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.long
def test_the_wheel_has_the_packages_the_command_and_nothing_else_at_the_top(
    forge_wheel: Path,
) -> None:
    with zipfile.ZipFile(forge_wheel) as archive:
        names = archive.namelist()
        scripts = archive.read(f"forge_llm_engine-{VERSION}.dist-info/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in names} == {
        *("forge", "forge_llm_engine.py"),
        f"forge_llm_engine-{VERSION}.dist-info",
    }
    assert {"forge/sim/world.py", "forge/bench/policy.py", "forge/policies/newest.py"} <= {*names}
    assert {"forge/learn/stubs/pool.py", "forge/learn/checks/pool.py"} <= {*names}
    assert sorted(names) == sorted({*names})
    assert "forge = forge_llm_engine:main" in scripts
    assert install_remedy("hf").endswith(f"'{forge_wheel.name}[hf]'")


@pytest.mark.long
def test_the_wheel_alone_runs(forge_wheel: Path, tmp_path: Path) -> None:
    run = run_forge(install(tmp_path, forge_wheel))
    assert (run.returncode, run.stdout, run.stderr) == (0, f"forge {VERSION}\n", "")


@pytest.mark.long
def test_a_wheel_that_is_built_from_the_source_distribution_is_the_same(
    forge_wheel: Path, tmp_path: Path
) -> None:
    """forge/sim and forge/bench are links here, and a source distribution has no links."""
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=tree, check=True, capture_output=True, timeout=LIMIT_S)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(forge_wheel) as expected:
        assert sorted(built.namelist()) == sorted(expected.namelist())


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("sim --requests 20 --rate 50", "requests    20: 20 length"),
        pytest.param(
            *("bench soak hash --requests 5", "ended                   5"), marks=pytest.mark.long
        ),
    ],
)
def test_the_simulator_and_the_benchmarks_run_where_only_the_wheel_is_installed(
    words: str, line: str, forge_wheel: Path, tmp_path: Path
) -> None:
    """The environment is new and empty: no pip, no dependency, nothing of this folder."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install(packages, forge_wheel)
    run = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", RUN, *words.split()],
        env={},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert line in run.stdout


@pytest.mark.parametrize("last", ["ours", "theirs"])
def test_two_packages_in_one_folder_are_refused_whichever_was_installed_last(
    last: str, forge_wheel: Path, other_wheel: Path, tmp_path: Path
) -> None:
    order = (other_wheel, forge_wheel) if last == "ours" else (forge_wheel, other_wheel)
    run = run_forge(install(tmp_path, *order))
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(
        f"forge: the distribution forge-infer installs a package forge into {tmp_path}"
    )
    assert "pip uninstall forge-infer" in line and "--force-reinstall" in line


def test_another_package_earlier_on_the_path_than_a_clone_is_refused(
    other_wheel: Path, tmp_path: Path
) -> None:
    """An editable install puts the clone at the end of the path."""
    run = run_forge(install(tmp_path, other_wheel), ROOT)
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"forge: Python finds another package forge first, in {tmp_path}/forge")


def test_another_package_later_on_the_path_is_no_obstacle(
    other_wheel: Path, tmp_path: Path
) -> None:
    run = run_forge(ROOT, install(tmp_path, other_wheel))
    assert (run.returncode, run.stdout, run.stderr) == (0, f"forge {VERSION}\n", "")


def test_what_is_left_after_the_other_was_uninstalled_is_refused(
    forge_wheel: Path, tmp_path: Path
) -> None:
    """Uninstalling removes the files that it lists: forge/__init__.py, which is then ours."""
    install(tmp_path, forge_wheel)
    (tmp_path / "forge" / "__init__.py").unlink()
    run = run_forge(tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith(f"forge: {tmp_path}/forge/__init__.py is missing")


def test_python_m_forge_makes_the_same_check(
    forge_wheel: Path, other_wheel: Path, tmp_path: Path
) -> None:
    program = "import runpy; runpy.run_module('forge', run_name='__main__')"
    run = run_forge(install(tmp_path, forge_wheel, other_wheel), program=program)
    assert run.returncode == 1
    assert run.stderr.startswith("forge: the distribution forge-infer installs")


def test_a_clone_that_nothing_installed_runs() -> None:
    assert find_conflict(str(ROOT / "forge" / "__init__.py"), ROOT) is None


def test_the_name_is_the_same_wherever_it_stands() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert DISTRIBUTION_NAME == DISTRIBUTION and f'name = "{DISTRIBUTION_NAME}"' in text


def test_nothing_says_to_install_forge_by_name_from_an_index() -> None:
    by_name = ("pip install forge", "pip install 'forge-", "Install forge-", "forge-infer[")
    patterns = ("*.md", "docs/*.md", "wiki/*.md", "forge/**/*.py", "bench/*.py", "sim/*.py")
    problems = [
        f"{path.relative_to(ROOT)}: {line}"
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
        for line in path.read_text(encoding="utf-8").splitlines()
        if any(each in line for each in by_name)
    ]
    assert problems == []
