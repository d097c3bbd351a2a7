"""Functions of the package take few parameters and are short; classes and files are not long either."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "edgeasync"
PARAMETERS_MAX = 10
PUBLIC_PARAMETERS_MAX = 15
"""Of what users call in Python: each parameter is a keyword of theirs."""

PUBLIC = ("sdk/", "async_train/")
LINES_MAX = 60
"""Of a function, with the docstring."""

CLASS_LINES_MAX = 450
ATTRIBUTES_MAX = 20
"""Of an object: what its methods assign. A record (`msgspec.Struct`) may have more fields."""

FILE_LINES_MAX = 500


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


def attributes(node):
    """Return the names that a class's methods assign on `self`."""
    stored = [
        each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    ]
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}


def large(tree):
    """Return the names of the classes in a tree that are long, or whose objects have many attributes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        node.name
        for node in classes
        if node.end_lineno - node.lineno >= CLASS_LINES_MAX or len(attributes(node)) > ATTRIBUTES_MAX
    }


def test_no_class_and_no_file_is_large():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    found = {f"{place}: {name}" for place, text in texts.items() for name in large(ast.parse(text))}
    assert found == set(), "give each responsibility a class, with a state of its own"
    assert [place for place, text in texts.items() if len(text.splitlines()) > FILE_LINES_MAX] == []


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


TWENTY = "; ".join(f"self.a{number} = self.b.c = 0" for number in range(20))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (f"  def f(self): {TWENTY}\n  def g(self): self.a0 = 0", set()),
        (f"  def f(self): {TWENTY}\n  def g(self): self.d = 0", {"A"}),
        ("  f()\n" * 449, set()),
        ("  f()\n" * 450, {"A"}),
    ],
)
def test_a_large_class_is_found(body, names):
    assert large(ast.parse(f"class A:\n{body}")) == names
