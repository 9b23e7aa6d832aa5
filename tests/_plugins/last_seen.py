"""What a condition that tests wait for was last: its source, and the value of each part of it."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def last_seen(condition: Callable[[], Any]) -> str:
    """A condition that is a lambda in words: `server.gauge("clients") == 0, with server.gauge("clients") = 1`.

    Its parts are asked once more for that. Of any other function there is the name only.
    """
    body = _body(condition)
    if body is None:
        return getattr(condition, "__qualname__", str(condition))
    seen = {ast.unparse(part): _value(part, condition) for part in _parts(body)}
    return ", with ".join([ast.unparse(body), *(f"{part} = {value}" for part, value in seen.items())])


def _body(condition: Callable[[], Any]) -> ast.expr | None:
    """What a lambda computes, read from its file."""
    code = getattr(condition, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    tree = ast.parse(Path(code.co_filename).read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _holds(node.body, places)]
    return max(bodies, key=lambda body: (body.lineno, body.col_offset), default=None)  # of nested ones, the innermost


def _holds(node: ast.expr, places: list[tuple[int, int]]) -> bool:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset) <= min(places) <= max(places) < (node.end_lineno, node.end_col_offset)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """What the value of an expression depends on, down to calls and their arguments, constants left out."""
    match node:
        case ast.Constant():
            inner = []
        case ast.BoolOp(values=inner):
            pass
        case ast.Compare(left=left, comparators=others):
            inner = [left, *others]
        case ast.UnaryOp(operand=operand) | ast.NamedExpr(value=operand):
            inner = [operand]
        case ast.Call(args=inner):
            yield node
        case _:
            yield node
            inner = []
    for each in inner:
        yield from _parts(each)


def _value(part: ast.expr, condition: Callable[[], Any]) -> str:
    names = {**condition.__globals__, **inspect.getclosurevars(condition).nonlocals}
    names |= {name: each.default for name, each in inspect.signature(condition).parameters.items()}
    try:
        return repr(eval(compile(ast.Expression(part), "<a condition>", "eval"), names))
    except Exception as error:  # noqa: BLE001 - it explains a failure, and must not hide it
        return repr(error)
