"""Small mistakes that a programmer makes: operators that change one place of a Python or Lua text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Edit(NamedTuple):
    """Put ``text`` in the place of ``source[start:end]``."""

    operator: str
    start: int
    end: int
    text: str


COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"), ast.GtE: (">", "<="), ast.Eq: ("!=",),
    ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
NOT_NUMBERS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.Dict)


class PythonEdits:
    """All edits of one module, but for functions and lines that ``skips_function`` and ``skips_line`` match."""

    def __init__(self, source: str, skips_function: re.Pattern[str], skips_line: re.Pattern[str]) -> None:
        self._source, self._skips_function, self._skips_line = source, skips_function, skips_line
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def all(self) -> Iterator[Edit]:
        for function in self._functions(ast.parse(self._source)):
            yield from self._function_edits(function)
            for statement in function.body:
                for node in self._own_nodes(statement):
                    yield from self._edits(node)

    def _functions(self, tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if self._skips_function.fullmatch(node.name):
                    continue
                yield node
            yield from self._functions(node)

    def _own_nodes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Without inner functions, messages and annotations."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Import):
            return
        if isinstance(node, ast.stmt) and self._is_skipped(node):
            return
        yield node
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "decorator_list") or (isinstance(node, ast.Raise) and name != "exc"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from self._own_nodes(child)

    def _is_skipped(self, node: ast.stmt) -> bool:
        """By its first line, or any of its lines if it contains no other statement."""
        last = node.lineno if hasattr(node, "body") else node.end_lineno
        return bool(self._skips_line.search("".join(self._lines[node.lineno - 1 : last])))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        text = self._source[start:end]
        return f"({text})" if isinstance(node, ast.BoolOp | ast.IfExp | ast.NamedExpr | ast.Compare) else text

    def _edit(self, operator: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(operator, *self._span(node), text)

    def _edits(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.If() | ast.While() | ast.IfExp():
                yield self._negated(node.test)
            case ast.Compare(ops=[operation], comparators=[right]):
                for other in COMPARISONS[type(operation)]:
                    yield self._edit("compare", node, f"{self._text(node.left)} {other} {self._text(right)}")
            case ast.BoolOp():
                other = " or " if isinstance(node.op, ast.And) else " and "
                yield self._edit("and-or", node, f"({other.join(map(self._text, node.values))})")
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
                if not isinstance(node.left, NOT_NUMBERS) and not isinstance(node.right, NOT_NUMBERS):
                    other = ARITHMETIC[type(node.op)]
                    yield self._edit("arithmetic", node, f"({self._text(node.left)} {other} {self._text(node.right)})")
            case ast.Constant(value=bool() as value):
                yield self._edit("constant", node, str(not value))
            case ast.Constant(value=int() | float() as value) if value in (0, 1):
                yield self._edit("constant", node, repr(type(value)(1 - value)))
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield self._edit("min-max", node.func, "max" if name == "min" else "min")
            case ast.Call(func=ast.Attribute(), keywords=[_, *_]):
                for keyword in node.keywords:
                    yield self._without_keyword(node, keyword)
            case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom() | ast.Await()):
                yield self._edit("drop call", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
                yield self._edit("drop assignment", node, "pass")
            case ast.Raise():
                yield self._edit("drop raise", node, "pass")
            case ast.Try():
                if node.finalbody and not self._is_skipped(node.finalbody[0]):
                    yield self._body("drop finally", node.finalbody, "pass")
                for handler in node.handlers:
                    if not isinstance(handler.body[-1], ast.Raise) and not self._is_skipped(handler.body[0]):
                        yield self._body("drop except", handler.body, "raise")

    def _negated(self, test: ast.expr) -> Edit:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._edit("negate", test, self._text(test.operand))
        start, end = self._span(test)
        return Edit("negate", start, end, f"not ({self._source[start:end]})")

    def _without_keyword(self, call: ast.Call, keyword: ast.keyword) -> Edit:
        parts = [self._source[slice(*self._span(argument))] for argument in call.args]
        for other in call.keywords:
            if other is not keyword:
                value = self._source[slice(*self._span(other.value))]
                parts.append(f"{other.arg}={value}" if other.arg else f"**{value}")
        return self._edit("drop argument", call, f"{self._text(call.func)}({', '.join(parts)})")

    def _body(self, operator: str, body: list[ast.stmt], text: str) -> Edit:
        return Edit(operator, self._span(body[0])[0], self._span(body[-1])[1], text)

    def _function_edits(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Edit]:
        returns = ast.unparse(function.returns) if function.returns else ""
        if returns in ("None", "Steps[None]", "NodeSteps[None]"):
            for statement in function.body[1:]:
                start, _ = self._span(statement)
                if not self._is_skipped(statement):
                    yield Edit("return early", start, start, f"return\n{' ' * statement.col_offset}")


LUA: tuple[tuple[str, str, str], ...] = (
    ("negate", r"\b(if|until) (.+?)(?= then\b|$)", r"\1 not (\2)"),
    ("compare", r" == ", " ~= "), ("compare", r" ~= ", " == "),
    ("compare", r" < ", " <= "), ("compare", r" < ", " > "), ("compare", r" <= ", " < "),
    ("compare", r" >= ", " > "), ("compare", r" >= ", " < "), ("compare", r" > ", " >= "), ("compare", r" > ", " < "),
    ("and-or", r" and ", " or "), ("and-or", r" or ", " and "),
    ("min-max", r"math\.max", "math.min"), ("arithmetic", r" \+ ", " - "),
    ("constant", r"\b1\b(?!')", "0"), ("constant", r"\b0\b(?!')", "1"),
    ("drop call", r"^(\s*)(redis\.call|wake_first)\(.*\)$", r"\1"),
    ("drop call", r"(?<=then )(redis\.call\([^()]*\)|wake_first\(\))(?= end)", ""),
    ("drop return", r"(?<=then )return [^ ]+(?= end)", ""),
    ("drop argument", r", '(GT|LT|NX)'", ""),
)  # fmt: skip


def lua_edits(source: str) -> Iterator[Edit]:
    start = 0
    for line in source.splitlines(keepends=True):
        code = line.rstrip("\n").partition("--")[0].rstrip()
        for operator, pattern, replacement in LUA:
            for found in re.finditer(pattern, code):
                yield Edit(operator, start + found.start(), start + found.end(), found.expand(replacement))
        start += len(line)
