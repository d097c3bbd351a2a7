"""Functions of the package take few parameters, and are short."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "edgeasync"
PARAMETERS_MAX = 10
PUBLIC_PARAMETERS_MAX = 15
"""Of what users call in Python: each parameter is a keyword of theirs."""

PUBLIC = ("sdk/", "async_train/")
LINES_MAX = 60
"""With the docstring."""


def functions(node, outer=()):
    """Yield the functions in a tree, with their full names."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = (*outer, child.name)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join(name), child
        yield from functions(child, name)


def parameters(function):
    """Return the names of a function's parameters but `self` and `cls`."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def over(tree, most):
    """Return the full names of the functions in a tree that are over a limit."""
    return {
        name
        for name, function in functions(tree)
        if len(parameters(function)) > most or function.end_lineno - function.lineno + 1 > LINES_MAX
    }


def test_no_function_takes_many_parameters_or_is_long():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        most = PUBLIC_PARAMETERS_MAX if place.startswith(PUBLIC) else PARAMETERS_MAX
        found |= {f"{place}: {name}" for name in over(ast.parse(path.read_text("utf-8")), most)}
    assert found == set(), "group what belongs together into a frozen struct, or split the function"


TEN = ", ".join("abcdefghij")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (f"def f({TEN}): ...", set()),
        (f"def f({TEN}, k): ...", {"f"}),
        (f"def f({TEN}, *, k): ...", {"f"}),
        (f"def f(k, /, {TEN}): ...", {"f"}),
        (f"class A:\n  def __init__(self, {TEN}): ...", set()),
        (f"class A:\n  async def f(self, {TEN}, k): ...", {"A.f"}),
        (f"if True:\n  def f({TEN}, k): ...", {"f"}),
        ("def f():\n" + "  g()\n" * 59, set()),
        ("def f():\n" + "  g()\n" * 60, {"f"}),
        ("@g\ndef f():\n" + "  g()\n" * 59, set()),
    ],
)
def test_what_is_over_a_limit_is_found(code, names):
    assert over(ast.parse(code), PARAMETERS_MAX) == names
