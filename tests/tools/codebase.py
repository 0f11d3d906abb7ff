"""Figures of the code base: words, modules, imports, private accesses and lengths.

    python tests/tools/codebase.py                 of this checkout
    python tests/tools/codebase.py OLD NEW         of other checkouts, one column each
    python tests/tools/codebase.py --json FILE     written to a file too

Everything is read from syntax trees, but for the files that a token crosses: a request runs in the
checkout, and each file of forge counts whose code is entered. Imports within functions and under
TYPE_CHECKING count as imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.project.prose import find_in_code, find_in_page  # noqa: E402

PACKAGES = ("forge", "sim", "bench")
NAMED_TUPLE_METHODS = {"_asdict", "_fields", "_make", "_replace"}

# Prints the files of forge that are entered while a request runs. The one before it warms up.
TOKEN_TRIP = """
import json, sys
from pathlib import Path
import forge
root = str(Path(forge.__file__).parent)
from forge import LLM, SamplingParams
files = set()
def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        files.add(frame.f_code.co_filename[len(root) + 1:])
with LLM("hash") as llm:
    llm.generate(["a"], SamplingParams(max_tokens=4))
    sys.setprofile(enter)
    llm.generate(["b"], SamplingParams(max_tokens=4))
    sys.setprofile(None)
print(json.dumps(sorted(files)))
"""

Graph = dict[str, set[str]]


def python_files(tree: Path, folder: str) -> list[Path]:
    """Return the Python files below a folder. forge/sim and forge/bench are links to others."""
    links = [tree / "forge" / name for name in ("sim", "bench")]
    paths = sorted((tree / folder).rglob("*.py"))
    return [path for path in paths if not any(path.is_relative_to(link) for link in links)]


def module_name(tree: Path, path: Path) -> str:
    """Return `forge.engine` for forge/engine.py and `forge.models` for its __init__.py."""
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(tree: Path) -> Graph:
    """Return module -> modules of forge, sim and bench that it imports, itself left out.

    forge.sim.world and forge.bench.step are the modules of sim/world.py and bench/step.py.
    """
    paths = [path for package in PACKAGES for path in python_files(tree, package)]
    names = {module_name(tree, path) for path in paths}
    graph: Graph = {name: set() for name in names}
    for path in paths:
        name = module_name(tree, path)
        for target in _imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            for link in ("sim", "bench"):
                if target.startswith(f"forge.{link}"):
                    target = target.removeprefix("forge.")
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)
    return graph


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected sets of two or more nodes (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def within(graph: Graph, package: str) -> Graph:
    """Return the part of the graph that is inside a package, without the package's __init__."""
    names = {name for name in graph if name.startswith(package + ".")}
    return {name: graph[name] & names for name in names}


def by_folder(graph: Graph, package: str) -> Graph:
    """Return the graph with the modules of each folder of the package as one node."""
    nodes: Graph = defaultdict(set)
    depth = package.count(".") + 2
    for name, targets in graph.items():
        node = ".".join(name.split(".")[:depth])
        nodes[node] |= {".".join(target.split(".")[:depth]) for target in targets} - {node}
    return dict(nodes)


def num_edges(graph: Mapping[str, set[str]]) -> int:
    """Return the number of pairs of a node and one that it imports."""
    return sum(map(len, graph.values()))


def private_accesses(paths: Iterable[Path]) -> list[str]:
    """Return the accesses to private members of objects whose class another file defines."""
    found = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {
            getattr(node, "name", None) or getattr(node, "attr", None)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Attribute) and _is_self(node.value))
        }
        found += [
            f"{path}:{node.lineno} {node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in own | NAMED_TUPLE_METHODS
            and not _is_self(node.value)
        ]
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def longest_file(paths: Iterable[Path]) -> tuple[int, str]:
    """Return the number of lines of the longest file, and its name."""
    return max((len(path.read_text(encoding="utf-8").splitlines()), path.name) for path in paths)


def files_of_a_token(tree: Path) -> int:
    """Return how many files of forge a request enters, with LLM and HashModel."""
    out = subprocess.run(
        [sys.executable, "-c", TOKEN_TRIP],
        cwd=tree,
        env={"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return len(json.loads(out))


def measure(tree: Path) -> dict[str, int | str]:
    """Return the figures of a checkout, by their names."""
    code = {folder: python_files(tree, folder) for folder in (*PACKAGES, "tests")}
    product = [path for package in PACKAGES for path in code[package]]
    pages = [
        *sorted(tree.glob("*.md")),
        *sorted(tree.glob("docs/*.md")),
        *sorted(tree.glob("wiki/*.md")),
    ]

    def prose(paths: Iterable[Path]) -> list[str]:
        return [
            finding.problem
            for path in paths
            if path.name not in ("prose.py", "test_prose.py")
            for finding in find_in_code(
                path.read_text(encoding="utf-8"), path.relative_to(tree).as_posix()
            )
        ]

    product_findings = prose(product)
    first_words = sum("begins with" in problem for problem in product_findings)
    graph = import_graph(tree)
    figures: dict[str, int | str] = {
        "words outside the style, code": len(product_findings) - first_words,
        "words outside the style, tests": len(prose(code["tests"])),
        "words outside the style, pages": sum(
            len(list(find_in_page(page.read_text(encoding="utf-8"), page.name))) for page in pages
        ),
        "docstrings that begin wrongly": first_words,
        "modules": len(product),
        "import cycles between modules": len(cycles(graph)),
    }
    for package in ("forge.models.hf", "sim"):
        part = within(graph, package)
        folders = by_folder(part, package)
        figures |= {
            f"{package}: modules": len(part),
            f"{package}: import edges": num_edges(part),
            f"{package}: cycles": len(cycles(part)),
            f"{package}: folders and single files": len(folders),
            f"{package}: edges between them": num_edges(folders),
            f"{package}: cycles between them": len(cycles(folders)),
        }
    length, name = longest_file(product)
    test_length, test_name = longest_file(code["tests"])
    return figures | {
        "files a token crosses": files_of_a_token(tree),
        "private accesses from sim": len(private_accesses(code["sim"])),
        "longest file": f"{length} {name}",
        "longest file of tests": f"{test_length} {test_name}",
        "Python files in tests/ itself": len(list((tree / "tests").glob("*.py"))),
        "README lines": len((tree / "README.md").read_text(encoding="utf-8").splitlines()),
    }


def main() -> None:
    """Print a table with a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    columns = [measure(tree.resolve()) for tree in args.checkouts]
    for name in columns[0]:
        values = "".join(f"{figures[name]!s:>24}" for figures in columns)
        print(f"{name:<46}{values}")
    if args.json:
        names = [tree.resolve().name for tree in args.checkouts]
        text = json.dumps(dict(zip(names, columns, strict=True)), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
