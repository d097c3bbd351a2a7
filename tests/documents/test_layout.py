"""Check that the unit tests mirror the package, as tests/README.md describes."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
LINES_MAX = 60
"""A module that is not longer may be without a test of its own."""

DECIDES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Compare, ast.Match, ast.Raise, ast.Try),
    *(ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.comprehension),
)
ROW = re.compile(r"^\| `([\w/{},]+)` \| `([\w/]+\.py)` \|", re.MULTILINE)


@cache
def modules(package):
    """Return the modules of a package but its `__init__`s, by their paths in it without a suffix."""
    found = {path.relative_to(ROOT / package).with_suffix(""): path for path in (ROOT / package).rglob("*.py")}
    return {module: path for module, path in found.items() if module.name != "__init__"}


EDGEASYNC = modules("edgeasync")
UNITS = sorted(path.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py"))


def decides(path):
    """Return whether a function of a module does more than to pass on what it is given."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, functions)]
    return any(isinstance(node, DECIDES) for function in defined for node in ast.walk(function))


@cache
def imported(path):
    """Return the modules that a test imports, or imports names from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found - {"edgeasync"}


def has_test(module):
    """Return whether a test has a module's name: in its place, or in another folder if it imports its package."""
    name = f"test_{module.name}.py"
    if (TESTS / "unit" / module.parent / name).exists():
        return True
    here = ".".join(("edgeasync", *module.parts))
    others = [path for path in TESTS.rglob(name) if path.relative_to(TESTS).parts[0] != "unit"]
    return any(imported(path) & {here, here.rpartition(".")[0]} for path in others)


def expand(pattern):
    """Return the modules that a pattern such as `net/{gate,zap}` names."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return [Path("".join(chosen)) for chosen in itertools.product(*parts)]


ROWS = ROW.findall((TESTS / "README.md").read_text("utf-8"))
LISTED = {module: test for pattern, test in ROWS for module in expand(pattern)}


def test_every_module_has_a_test_or_is_listed_with_the_test_that_covers_it():
    long = [module for module, path in EDGEASYNC.items() if len(path.read_text("utf-8").splitlines()) > LINES_MAX]
    without = {str(module) for module in long if decides(EDGEASYNC[module]) and not has_test(module)}
    listed = {str(module) for module in LISTED}
    assert sorted(without - listed) == [], "write tests/unit/PACKAGE/test_MODULE.py"
    assert sorted(listed - without) == [], "take them out of the table in tests/README.md"


def test_listed_tests_are_there_and_list_a_module_once():
    assert [test for _, test in ROWS if not (TESTS / test).exists()] == []
    assert len([module for pattern, _ in ROWS for module in expand(pattern)]) == len(LISTED)
    assert expand("net/{gate,zap}") == [Path("net/gate"), Path("net/zap")]


def belongs(path):
    """Return whether a unit test is named after a module or its package, or extends the name of one that is."""
    package, *inner = path.parts if path.parts[0] in ("benchmarks", "simulation") else ("edgeasync", *path.parts)
    words = path.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        module = Path(*inner[:-1], "_".join(words[:count]))
        known = module in modules(package) or module.name == (module.parent.name or package)
        if known and (TESTS / "unit" / path.with_name(f"test_{module.name}.py")).exists():
            return True
    return False


def test_every_unit_test_belongs_to_a_module():
    strays = [str(path) for path in UNITS if not belongs(path)]
    assert strays == [], "call it test_MODULE.py, or test_MODULE_SUBJECT.py beside that"
