"""Pages name code that exists: each name and each path in the code spans of their text.

    tests/core/test_seam.py::test_x    the file has that test
    forge/seam.py, h200-*.json    the path exists: from the root, from the page, or below CODE
    StepPlan, f(x), a.b, a_b      each word is a name in CODE, or a word of a string there
    word                          the same check, if the span is this one word

Names are definitions, fields, attributes, parameters, keywords, imports and modules. Comments,
docstrings and local variables do not count: they can keep a name that the code no longer has.
Fenced blocks are not read here: tests/docs/test_pages.py runs them.
"""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import Any

from tests.docs.pages import PAGES, ROOT, text_outside_blocks

CODE = ("forge", "sim", "bench", "tests")
PATHS = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*"))
LISTING = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in PATHS)
MODULES = {*CODE, *(path.stem for path in PATHS if path.suffix == ".py" or path.is_dir())}
BUILT_IN = {*dir(builtins)}
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in PATHS
    # The strings of this file have names that do not exist.
    if path.suffix == ".py" and path != Path(__file__).resolve()
}

FOREIGN = {
    "HTTP": "application/json forwarded text/event-stream",
    "Caddy, nginx": "header_up http_host proxy_set_header",
    "Kubernetes": "preStop",
    "browsers": "EventSource",
    "HuggingFace": "Qwen/Qwen3-0.6B models/Qwen3-0.6B",
    "LiteLLM": "anthropic/hash hosted_vllm/hash openai/hash provider_specific_fields "
    "text-completion-openai/hash",
    "OpenRouter": "reasoning_details",
    "instructor": "MD_JSON create_iterable",
    "openai-agents": "ModelBehaviorError",
    "vLLM": "wake_up",
    "SGLang": "token_ids_logprob",
    "W3C": "tracestate",
    "OpenTelemetry": "OTEL_SERVICE_NAME OTEL_RESOURCE_ATTRIBUTES OTEL_TRACES_SAMPLER "
    "OTEL_EXPORTER_OTLP_HEADERS",
    "text of an example": "aaa",
    "file of the reader": "FILE.json FILE.png FILE.py FILE.yaml calibration.json mine.py "
    "run.json run.jsonl run.pdf run.png run.svg",
}
"""Owner -> names that pages may use and CODE does not have."""

# The table of docs/Model-classes.md: model types of transformers.
MODEL_TYPES = re.compile("<!-- model-classes:begin -->.*<!-- model-classes:end -->", re.DOTALL)
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
WORD = re.compile(r"\w+")
TEST = re.compile(r"([\w/]+\.py)::(\w+)")
# Neither a part of a URL, nor an absolute path, nor a hidden file.
PATH = re.compile(
    r"(?<![\w/:.~<-])(?!\.\w)"
    r"(?:(?:[\w.*-]+/)+[\w.*-]*"
    r"|[\w.*-]+\.(?:csv|jsonl?|md|pdf|png|py|svg|toml|txt|ya?ml)\b)"
)
NAME = re.compile(
    r"^[A-Za-z]\w{2,}$"  # the whole span
    r"|(?<![\w.-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"  # a.b
    r"|\b[A-Za-z_]\w*(?=\()"  # f()
    r"|\b[A-Za-z]\w*_\w+|\b_\w+"  # a_b
    r"|\b[A-Z]\w*[a-z]\w*[A-Z]\w*"  # CamelCase
)

# The field with the name, for each type of node that has one.
NAME_FIELDS: dict[type[ast.AST], str] = {
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.ImportFrom: "module",
    ast.alias: "name",
    ast.Constant: "value",
}


def names_of(source: str) -> set[str]:
    """Return the names of a module and the words of its strings, except docstrings."""
    names: set[str] = set()
    nodes: list[Any] = [ast.parse(source)]
    for node in nodes:
        kind = type(node)
        if kind is ast.Expr and isinstance(node.value, ast.Constant):
            continue
        if kind is ast.Module or kind is ast.ClassDef:
            names |= assigned_names(node.body)
        if kind in NAME_FIELDS:
            value = getattr(node, NAME_FIELDS[kind])
            if isinstance(value, str):
                names.update(WORD.findall(value))
        # As ast.iter_child_nodes does in twice the time.
        for child in vars(node).values():
            if isinstance(child, list):
                nodes += [each for each in child if isinstance(each, ast.AST)]
            elif isinstance(child, ast.AST):
                nodes.append(child)
    return names


def assigned_names(body: list[ast.stmt]) -> set[str]:
    """Return the constants of a module, or the fields of a class."""
    targets: list[ast.expr] = []
    for statement in body:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    nodes = [node for target in targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


@cache
def words_in(path: Path) -> set[str]:
    """Return every word of a file of SOURCES."""
    return set(WORD.findall(SOURCES[path]))


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of a file of SOURCES."""
    return names_of(SOURCES[path])


@cache
def is_name(word: str) -> bool:
    """Return True if CODE has the name, or makes it from one with the prefix forge_ or FORGE_."""
    if word in MODULES or word in BUILT_IN:
        return True
    # Parsing takes longer than all else here: parse only the files that have the word.
    if any(word in words_in(path) and word in names_in(path) for path in SOURCES):
        return True
    prefix, _, rest = word.partition("_")
    return prefix in {"forge", "FORGE"} and is_name(rest.lower())


def is_path(path: str, page: Path) -> bool:
    """Return True if the path exists from the root or the page, or is the end of one in CODE."""
    ending = re.escape(path.rstrip("/")).replace(r"\*", "[^/\n]*")
    return (
        (ROOT / path).exists()
        or (page.parent / path).exists()
        or re.search(f"/{ending}$", LISTING, re.MULTILINE) is not None
    )


def is_test(path: str, name: str) -> bool:
    """Return True if the file, named from the root, has the test."""
    return re.search(rf"\bdef {name}\(", SOURCES.get(ROOT / path, "")) is not None


def unknown_names(text: str, page: Path) -> list[str]:
    """Return the names, paths and tests in code spans of `text` that do not exist."""
    unknown: list[str] = []
    for _, span in SPAN.findall(MODEL_TYPES.sub("", text_outside_blocks(text))):
        unknown += [
            f"{path}::{name}" for path, name in TEST.findall(span) if not is_test(path, name)
        ]
        span = TEST.sub(" ", span)
        unknown += [path for path in PATH.findall(span) if not is_path(path, page)]
        span = PATH.sub(" ", span)
        words = [word for name in NAME.findall(span) for word in name.split(".")]
        unknown += [word for word in words if not is_name(word)]
    return unknown


@cache
def unknown_names_of_pages() -> dict[str, list[str]]:
    """Return the unknown names of each page, FOREIGN among them."""
    return {
        page.relative_to(ROOT).as_posix(): unknown_names(page.read_text(encoding="utf-8"), page)
        for page in PAGES
    }


def foreign_names() -> set[str]:
    return set(" ".join(FOREIGN.values()).split())


def test_pages_name_what_exists() -> None:
    wrong = {
        page: [name for name in names if name not in foreign_names()]
        for page, names in unknown_names_of_pages().items()
    }
    assert {page: names for page, names in wrong.items() if names} == {}


def test_each_foreign_name_is_on_a_page_and_not_in_the_code() -> None:
    assert foreign_names() - set().union(*unknown_names_of_pages().values()) == set()


def test_names_paths_and_tests_that_do_not_exist_are_reported() -> None:
    """Each wrong name follows a right one of the same form, which is not reported."""
    text = """
`StepPlan` `NoSuchPlan`, `StepPlan.drafts` `StepPlan.no_drafts`, `hash()` `no_hash()`, `unheardof`,
`schedule` `LLM(policy="FILE")` `LLM(no_policy="FILE")`, `FORGE_MODEL=tiny` `FORGE_NO_MODEL=tiny`,
`forge/seam.py` `forge/no_seam.py`, `seam.py` `no_seam.py`, `forge/models/` `forge/no_models/`,
`models/hash.py` `models/no_hash.py`, `Home.md` `No-home.md`, `engine_*.py` `no_engine_*.py`,
`tests/docs/test_pages.py::test_dead_links_are_found`
`tests/docs/test_pages.py::test_no_links_are_found`,
`tests/test_no_docs.py::test_dead_links_are_found`, ``two no_ticks``, NoSpan, `/no/file.md`
```text
`NoSuchPlan`
```
<!-- model-classes:begin -->`no_such_type`<!-- model-classes:end -->
"""
    assert unknown_names(text, ROOT / "wiki" / "Seam.md") == [
        "NoSuchPlan",
        "no_drafts",
        "no_hash",
        "unheardof",
        "no_policy",
        "FORGE_NO_MODEL",
        "forge/no_seam.py",
        "no_seam.py",
        "forge/no_models/",
        "models/no_hash.py",
        "No-home.md",
        "no_engine_*.py",
        "tests/docs/test_pages.py::test_no_links_are_found",
        "tests/test_no_docs.py::test_dead_links_are_found",
        "no_ticks",
    ]


def test_docstrings_comments_and_local_variables_have_no_names() -> None:
    source = '''
"""In a docstring."""
import a_module
from a_package import a_function as other  # in a comment
CONSTANT = call(a_keyword="a string")
class Thing(a.base):
    """More."""
    field: int
    def method(self, parameter):
        local = parameter
        self.attribute = local
'''
    assert names_of(source) == set(
        "a_module a_package a_function CONSTANT a_keyword a string Thing base field method self "
        "parameter attribute".split()
    )
