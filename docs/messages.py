"""Collects every error message of the package from its source.

`python -m docs.messages` prints the messages with their files and lines.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

RAISED = {"ValueError", "TypeError"}
"""Python's own errors that settings and arguments raise."""

SENTENCES = {"Refuse": (1,), "RefusalError": (1,), "Refused": (0, 1), "fail": (1, 2), "warn": (1, 2)}
"""Call -> its arguments that are words for people. For all other errors this is the first argument."""

PLAIN = {"len", "str", "repr", "sorted", "list", "tuple", "set", "dict", "type", "round", "next", "join"}
"""Functions whose argument names a value better than they do."""


@dataclass(frozen=True, order=True)
class Message:
    """A message of an error, with a name in angle brackets for each value in it."""

    error: str
    module: str
    line: int
    text: str


@cache
def messages(package: Path = ROOT / "edgeasync") -> tuple[Message, ...]:
    """Return every message, by error and place."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    errors = RAISED | set(SENTENCES) | set(_errors(trees.values()))
    constants = _constants(trees.values())
    found = set()
    for path, tree in trees.items():
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for error, call, words in _calls(tree, errors):
            if error in ("fail", "warn") and ".ops.doctor" not in module:
                continue
            text = "; ".join(filter(None, (_text(each, constants) for each in words)))
            if " " in text and any(part.isalpha() for part in text.split()):
                found.add(Message(_GROUPS.get(error, error), module, call.lineno, text))
    return tuple(sorted(found))


_GROUPS = {"Refused": "Refuse", "RefusalError": "Refuse", "fail": "Finding", "warn": "Finding"}


def _errors(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Yield the names of the package's error classes."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                _name(base).endswith(("Error", "Exception")) for base in node.bases
            ):
                yield node.name


def _constants(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Return the strings that modules give a name, by that name, if it means the same in all modules."""
    found: dict[str, ast.expr] = {}
    twice = set()
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                twice |= {name} & found.keys()
                if isinstance(node.value, ast.Constant | ast.JoinedStr):
                    found[name] = node.value
    return {
        name: value
        for name, value in found.items()
        if name not in twice and not (isinstance(value, ast.Constant) and not isinstance(value.value, str))
    }


def _calls(tree: ast.AST, errors: set[str]) -> Iterator[tuple[str, ast.Call, list[ast.expr]]]:
    """Yield every error that is made, with its words; a name for words is replaced by what it was set to."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    scopes: list[ast.AST] = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    seen: set[ast.Call] = set()
    for scope in reversed(scopes):
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and node not in seen and (name := _name(node.func)) in errors:
                seen.add(node)
                places = SENTENCES.get(name, (0,))
                given = [node.args[place] for place in places if place < len(node.args)]
                if len(given) == 1:
                    yield from ((name, node, [way]) for way in _meant(given[0], scope, functions))
                elif given:
                    yield name, node, [_last_meant(each, node, scope) for each in given]


def _last_meant(words: ast.expr, call: ast.Call, scope: ast.AST) -> ast.expr:
    """Return what a variable was last set to above a call."""
    if isinstance(words, ast.Name):
        above = [node for node in _assignments(words.id, scope) if node.lineno < call.lineno]
        return max(above, key=lambda node: node.lineno).value if above else words
    return words


def _assignments(name: str, scope: ast.AST) -> list[ast.Assign]:
    """Return the statements that set a variable."""
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]


def _meant(words: ast.expr, scope: ast.AST, functions: dict[str, ast.FunctionDef]) -> list[ast.expr]:
    """Return what an expression may be: all that a variable is set to, or that a function here returns."""
    if isinstance(words, ast.IfExp):
        return [*_meant(words.body, scope, functions), *_meant(words.orelse, scope, functions)]
    found: list[ast.expr] = []
    if isinstance(words, ast.Name):
        found = [node.value for node in _assignments(words.id, scope)]
    elif isinstance(words, ast.Call) and isinstance(words.func, ast.Name) and words.func.id in functions:
        returned = ast.walk(functions[words.func.id])
        found = [node.value for node in returned if isinstance(node, ast.Return) and node.value is not None]
    worded = [each for each in found if isinstance(each, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp)]
    parts = [part for each in worded for part in _meant(each, scope, {})]
    return parts or [words]


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """Return words as a person reads them."""
    match node:
        case ast.Constant(value=value):
            return value if isinstance(value, str) else repr(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, constants) for part in parts)
        case ast.FormattedValue(value=value):
            return _text(value, constants)
        case ast.Name(id=name) if name in constants:
            return _text(constants[name], constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.IfExp(body=body, orelse=orelse):
            return f"({_text(body, constants)} | {_text(orelse, constants)})"
        case ast.Call(func=ast.Name(id="argument"), args=[ast.Constant(value=str(name)), *_]):
            return f"{name}=<{name}>"
    return f"<{_hole(node)}>"


def _hole(node: ast.expr) -> str:
    """Return a name for a value."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call(func=function, args=arguments):
            return _hole(_named(function, arguments))
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _hole(first.iter)
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return _hole(value)
        case ast.BinOp(left=value) | ast.NamedExpr(target=value) | ast.JoinedStr(values=[*_, value]):
            return _hole(value)
    return "value"


def _named(function: ast.expr, arguments: list[ast.expr]) -> ast.expr:
    """Return the part of a call that names its value best."""
    name = _name(function)
    if name in ("map", "filter") and len(arguments) > 1:
        return arguments[1]
    if arguments and (name in PLAIN or isinstance(function, ast.Name)):
        return arguments[0]
    if isinstance(function, ast.Attribute) and not isinstance(function.value, ast.Constant):
        return function.value
    return function


if __name__ == "__main__":
    for message in messages():
        print(f"{message.error}\t{message.module}:{message.line}\t{message.text}")  # noqa: T201
