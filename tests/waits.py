"""Calls that wait for another process or thread, found in the source, and whether each has a limit."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = ("cluster", "deployments", "runtime")
OFFLINE = ("runtime/training", "deployments/cli")
"""They serve nobody: whoever started them sees that they wait, and ends them."""
OF_SOCKETS = {"recv", "recv_into", "recv_fds", "recv_bytes"}
"""Their limit is the socket's, as that of `accept` and `connect`."""
WITH_A_LIMIT = {"wait", "join", "get", "result", "acquire", "communicate", "select"}
"""Their limit is an argument."""
RUNS = {"run", "check_output", "check_call", "call"}
LIMITS = {"timeout", "timeout_s"}


class Wait(NamedTuple):
    """A call without a limit of its own."""

    path: str
    function: str
    """Function that contains the wait, after its class."""
    call: str
    line: int


def unbounded() -> list[Wait]:
    """Every one in the source of what serves."""
    found: list[Wait] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(OFFLINE):
                found += in_source(path.read_text(encoding="utf-8"), name)
    return found


def in_source(source: str, path: str) -> list[Wait]:
    """Waits in a file."""
    return list(_walk(ast.parse(source), path, "", limited=False))


def _walk(node: ast.AST, path: str, function: str, *, limited: bool) -> Iterator[Wait]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        function = f"{function}.{node.name}".lstrip(".")
        limited = False
    if isinstance(node, ast.AsyncWith):
        limited = limited or any(_called(item.context_expr) == "asyncio.timeout" for item in node.items)
    if not limited and (isinstance(node, ast.Await | ast.Call)):
        call = _unbounded_await(node) if isinstance(node, ast.Await) else _unbounded_call(node)
        if call is not None:
            yield Wait(path, function, call, node.lineno)
    awaits_call = isinstance(node, ast.Await) and isinstance(node.value, ast.Call)
    for child in ast.iter_child_nodes(node):
        # An await within a limit is limited, whatever it is called.
        yield from _walk(child, path, function, limited=limited or (awaits_call and _limits(node.value)))


def _unbounded_await(node: ast.Await) -> str | None:
    value = node.value
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):  # a task or a future
        return f"await {ast.unparse(value)}"
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith((".remote", "call_apart")):
        return f"await {ast.unparse(value.func)}"
    return None


def _unbounded_call(node: ast.Call) -> str | None:
    name, keywords = _called(node), {keyword.arg: keyword.value for keyword in node.keywords}
    receiver, _, method = name.rpartition(".")
    limit = next((keywords[key] for key in LIMITS if key in keywords), None)
    if limit is not None:
        return name if _is_none(limit) else None
    by_argument = receiver and method in WITH_A_LIMIT and (not node.args or _is_none(node.args[0]))
    unbounded = (
        name in {"asyncio.wait", "ray.get", "ray.wait"}
        or (method == "wait_for" and len(node.args) < 2)
        or (name == "fcntl.flock" and not {"LOCK_NB", "LOCK_UN"} & set(re.findall(r"\w+", ast.unparse(node))))
        or (receiver == "subprocess" and method in RUNS)
        or method in OF_SOCKETS
        or (method in {"accept", "connect"} and "sock" in receiver)
        or (method == "poll" and bool(node.args) and _is_none(node.args[0]))
        or by_argument
    )
    return name if unbounded else None


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _limits(call: ast.Call) -> bool:
    return _called(call) == "asyncio.wait_for"


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""
