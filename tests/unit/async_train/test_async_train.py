"""The toolbox stays thin, and says who a process is."""

import ast
from pathlib import Path

import pytest

from edgeasync import async_train

LINES_MAX = 60
FILES = sorted(Path(async_train.__file__).parent.rglob("*.py"))


def code_lines(found, text):
    """Return how many lines of a class are code: neither empty nor part of a docstring."""
    said = set()
    for node in ast.walk(found):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            said |= set(range(node.lineno, node.end_lineno + 1))
    lines = text.splitlines()
    return sum(
        bool(lines[number - 1].strip())
        for number in range(found.lineno, found.end_lineno + 1)
        if number not in said
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_class_is_short(path):
    text = path.read_text("utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    assert not {each.name: count for each in classes if (count := code_lines(each, text)) >= LINES_MAX}


def test_every_name_is_there():
    assert all(getattr(async_train, name) for name in dir(async_train))
    with pytest.raises(AttributeError, match="AsyncServer"):
        async_train.AsyncServer  # noqa: B018
