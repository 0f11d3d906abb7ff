"""Every place in a source file where a small change makes a bug, and the changes that fit there.

    Site       a piece of source and what it may become; `replaced` makes one of the changes
    sites(...) all sites of a file, in the order of its syntax tree

    operators      < becomes <= or >=, + becomes -, `and` becomes `or`, `not` is dropped
    constants      1 becomes 2 or 0, True becomes False, "name" becomes "XXname"
    conditions     negated, or replaced by True or False
    statements     a call, raise, del, assignment to an attribute or an element is removed
    results        return None; break and continue become pass; a handler raises again
    calls          two arguments are swapped, a keyword is dropped, min becomes max
    slices         one bound is dropped

Left alone: docstrings, annotations, decorators, imports, `__all__`, f-strings, texts with spaces,
and strings in raise statements and log calls.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("//", "+"),
    ast.Div: ("*",),
    ast.FloorDiv: ("*", "/"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
    ast.LShift: (">>",),
    ast.RShift: ("<<",),
    ast.BitAnd: ("|",),
    ast.BitOr: ("&",),
    ast.BitXor: ("&",),
    ast.MatMult: ("*",),
}
OPERATOR = re.compile(
    r"\b(?:is\s+not|not\s+in|is|in|and|or)\b|\*\*|//|<<|>>|<=|>=|==|!=|[-+*/%&|^@<>]"
)
CALL_SWAPS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "reversed": "iter",
    "floor": "ceil",
    "ceil": "floor",
    "startswith": "endswith",
    "endswith": "startswith",
    "popleft": "pop",
    "appendleft": "append",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "partition": "rpartition",
    "rpartition": "partition",
    "find": "rfind",
    "rfind": "find",
}
SYMMETRIC = {"min", "max", "isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast"}
TYPES = {"TypeVar", "NewType", "ParamSpec", "Literal", "Annotated"}
IGNORED_NAMES = {"__all__", "__slots__", "__match_args__"}
LOGGERS = {"log", "logger", "_log", "LOG", "logging", "warnings"}
WORD = re.compile(r"[A-Za-z_][\w./-]*")


class Site(NamedTuple):
    """A piece of a file and what it may become.

    lines     where the piece runs, or for a default the body of its function
    function  the innermost function by its qualified name, "" for what runs at import
    used      names that take their value at import from the piece
    """

    path: str
    start: int
    end: int
    choices: tuple[str, ...]
    kind: str
    function: str
    lines: tuple[int, ...]
    used: tuple[str, ...]

    def replaced(self, source: bytes, choice: str) -> bytes:
        """Return the source with the piece changed."""
        return source[: self.start] + choice.encode() + source[self.end :]


def sites(path: str, source: bytes) -> list[Site]:
    """Return every site of a file."""
    finder = _Finder(path, source)
    finder.statements(ast.parse(source).body)
    return finder.found


def assignments(source: str) -> list[tuple[set[int], tuple[str, ...]]]:
    """Return the lines and the names of each assignment outside functions and classes."""
    return [
        (set(range(node.lineno, (node.end_lineno or node.lineno) + 1)), _targets(node))
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]


def _targets(node: ast.Assign | ast.AnnAssign) -> tuple[str, ...]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def changed_lines(before: bytes, after: bytes) -> tuple[int, str, str]:
    """Return the number of the first line that changes, the lines before, and the lines after."""
    old, new = before.decode().splitlines(), after.decode().splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    (_, low, _, new_low, _), (_, _, high, _, new_high) = changed[0], changed[-1]
    return low + 1, "\n".join(old[low:high]), "\n".join(new[new_low:new_high])


class _Finder:
    """Walks one file. It knows the function and the statement it is in."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Site] = []
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._function: list[str] = []
        self._in_function = False
        self._lines: tuple[int, ...] = ()
        self._used: tuple[str, ...] = ()
        self._quiet = False

    # Where things stand.

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _add(self, kind: str, start: int, end: int, *choices: str) -> None:
        function = ".".join(self._function) if self._in_function else ""
        site = Site(self._path, start, end, choices, kind, function, self._lines, self._used)
        self.found.append(site)

    def _replace(self, kind: str, node: ast.expr | ast.stmt, *choices: str) -> None:
        self._add(kind, self._start(node), self._end(node), *choices)

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, *choices: str) -> None:
        """Add the operator that stands between two operands."""
        low, high = self._end(left), self._start(right)
        between = self._source[low:high]
        bare = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), between).decode()
        match = OPERATOR.search(bare)
        assert match is not None, f"{self._path}: no operator in {between!r}"
        self._add(kind, low + match.start(), low + match.end(), *choices)

    # Statements.

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._definition(node)
                return
            case ast.ClassDef():
                self._function.append(node.name)
                self.statements(node.body)
                self._function.pop()
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
        bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        end = (node.end_lineno or node.lineno) + 1
        if isinstance(node, ast.Match):
            end = node.cases[0].pattern.lineno
        elif bodies[0]:
            end = bodies[0][0].lineno
        self._lines = tuple(range(node.lineno, max(end, node.lineno + 1)))
        self._used = self._assigned(node)
        if not {*self._used} & IGNORED_NAMES:
            self._header(node)
        self._used = ()
        for body in bodies:
            self.statements(body)
        for handler in getattr(node, "handlers", []):
            self._handler(handler)
        for case in getattr(node, "cases", []):
            self._lines = (case.pattern.lineno,)
            if case.guard is not None:
                self._condition(case.guard, "True")
            self.statements(case.body)

    def _assigned(self, node: ast.stmt) -> tuple[str, ...]:
        """Return the names that a statement outside functions assigns."""
        if self._in_function or not isinstance(node, ast.Assign | ast.AnnAssign):
            return ()
        return _targets(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = self._in_function
        self._function.append(node.name)
        self._in_function = True
        # A default counts when the function runs.
        self._lines = tuple(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._expression(default)
        self.statements(node.body)
        self._in_function = outside
        self._function.pop()

    def _handler(self, node: ast.ExceptHandler) -> None:
        self._lines = tuple(range(node.lineno, node.body[0].lineno + 1))
        if not isinstance(node.body[-1], ast.Raise):
            start, end = self._start(node.body[0]), self._end(node.body[-1])
            self._add("handler raises", start, end, "raise")
        self.statements(node.body)

    def _header(self, node: ast.stmt) -> None:
        """Add what the statement itself offers, without the statements in it."""
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
                self._replace("statement removed", node, "pass")
            case ast.Raise(exc=ast.expr()):
                self._replace("statement removed", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                if self._function[-1:] != ["__init__"]:
                    self._replace("statement removed", node, "pass")
            case ast.AugAssign(op=op, target=target, value=value):
                self._replace("statement removed", node, "pass")
                choices = [f"{each}=" for each in ARITHMETIC[type(op)]]
                between = self._source[self._end(target) : self._start(value)]
                low = self._end(target) + len(between) - len(between.lstrip())
                self._add("operator", low, self._end(target) + between.index(b"=") + 1, *choices)
            case ast.Break() | ast.Continue():
                self._replace("jump", node, "pass")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                self._replace("returns None", node, "return None")
            case ast.If(test=test) if self._text(test) != '__name__ == "__main__"':
                self._condition(test, "True", "False")
            case ast.While(test=test) if not isinstance(test, ast.Constant):
                self._condition(test, "False")
            case ast.Assert(test=test):
                self._condition(test)
                self._expression(test)
                return
        self._quiet = isinstance(node, ast.Raise)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    self._expression(child)
                elif isinstance(child, ast.withitem):
                    self._expression(child.context_expr)
        self._quiet = False

    # Expressions.

    def _condition(self, test: ast.expr, *constants: str) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            # Dropping its `not` is a site of its own.
            negated: tuple[str, ...] = ()
        else:
            negated = (f"not ({self._text(test)})",)
        if negated or constants:
            self._replace("condition", test, *negated, *constants)

    def _expression(self, node: ast.expr) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.Subscript(value=ast.Name(id=name)) if name in TYPES:
                return
            case ast.Call(func=ast.Name(id=name)) if name in TYPES:
                return
            case ast.Constant():
                self._constant(node)
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
                    self._operator("comparison", left, right, *COMPARISONS[type(op)])
            case ast.BoolOp(op=op, values=values):
                other = "or" if isinstance(op, ast.And) else "and"
                for left, right in pairwise(values):
                    self._operator("and, or", left, right, other)
            case ast.BinOp(op=op, left=left, right=right):
                if not self._is_text_or_type(node):
                    self._operator("operator", left, right, *ARITHMETIC[type(op)])
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
                self._replace("unary dropped", node, f"({self._text(operand)})")
            case ast.IfExp(test=test):
                self._condition(test, "True", "False")
            case ast.Slice():
                self._slice(node)
            case ast.Call():
                self._call(node)
                return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child)
            elif isinstance(child, ast.comprehension):
                self._expression(child.iter)
                for test in child.ifs:
                    self._condition(test, "True")
                    self._expression(test)
            elif isinstance(child, ast.arguments):
                for default in [*child.defaults, *child.kw_defaults]:
                    if default is not None:
                        self._expression(default)

    def _is_text_or_type(self, node: ast.BinOp) -> bool:
        """Return whether the operator joins texts or types, where another is a plain TypeError."""
        if isinstance(node.op, ast.BitOr) and not self._in_function:
            return True
        for side in (node.left, node.right):
            if isinstance(side, ast.JoinedStr):
                return True
            if isinstance(side, ast.Constant) and isinstance(side.value, str | bytes | None):
                return True
        return False

    def _constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool() as value:
                self._replace("constant", node, str(not value))
            case int() as value:
                self._replace("constant", node, str(value + 1), str(value - 1))
            case float() as value:
                self._replace("constant", node, repr(value * 2 or 1.0))
            case str() as value if WORD.fullmatch(value) and not self._quiet:
                self._replace("constant", node, repr("XX" + value))

    def _slice(self, node: ast.Slice) -> None:
        parts = {"lower": node.lower, "upper": node.upper, "step": node.step}
        for name, part in parts.items():
            if part is not None:
                kept = {n: "" if p is None else self._text(p) for n, p in parts.items()}
                kept[name] = ""
                step = f":{kept['step']}" if kept["step"] else ""
                self._replace("slice", node, f"{kept['lower']}:{kept['upper']}{step}")

    def _call(self, node: ast.Call) -> None:
        func = node.func
        called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if called in CALL_SWAPS:
            self._add("call", self._end(func) - len(called), self._end(func), CALL_SWAPS[called])
        first = node.args[:2]
        if len(first) == 2 and called not in SYMMETRIC:
            one, two = first
            starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
            if not starred and ast.dump(one) != ast.dump(two):
                between = self._source[self._end(one) : self._start(two)].decode()
                swapped = f"{self._text(two)}{between}{self._text(one)}"
                self._add("arguments swapped", self._start(one), self._end(two), swapped)
        for text, keyword in self._keywords(node):
            self._add("keyword dropped", text.start, text.stop, "")
            assert keyword.arg is not None
        # What a log line or a help text says is for people.
        quiet = self._quiet
        owner = func.value if isinstance(func, ast.Attribute) else func
        self._quiet |= isinstance(owner, ast.Name) and owner.id in LOGGERS
        self._expression(func)
        for child in _arguments(node, called):
            self._expression(child)
        self._quiet = quiet

    def _keywords(self, node: ast.Call) -> Iterator[tuple[slice, ast.keyword]]:
        """Yield each keyword argument with the piece of source it takes, a comma included."""
        for keyword in node.keywords:
            if keyword.arg in (None, "help", "metavar", "description"):
                continue
            start = self._starts[keyword.lineno - 1] + keyword.col_offset
            end = self._end(keyword.value)
            closing = re.match(rb"\)*\s*,[ ]*", self._source[end:])
            if closing and not closing[0].startswith(b")"):
                yield slice(start, end + len(closing[0])), keyword
            elif re.match(rb"\s*\)", self._source[end:]):
                yield slice(start, end), keyword


def _arguments(node: ast.Call, called: str) -> list[ast.expr]:
    """Return the arguments in which a change is one of behaviour."""
    if called in ("isinstance", "issubclass", "cast"):
        return node.args[1:] if called == "cast" else node.args[:1]
    named = [k.value for k in node.keywords if k.arg not in ("help", "metavar", "description")]
    return [*node.args, *named]
