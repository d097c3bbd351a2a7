"""Every public name and module has an example in its docstring, which says what the code does."""

import doctest
import inspect

import pytest

import edgeasync
from docs.generated import MODULES, VALUES, public_names

NAMES = {name: value for name, value in public_names().items() if name.removeprefix("edgeasync.") not in VALUES}


@pytest.mark.parametrize("name", ["edgeasync", *(f"edgeasync.{module}" for module in MODULES), *NAMES])
def test_an_example_works(name, tmp_path, monkeypatch):
    value = edgeasync if name == "edgeasync" else NAMES.get(name) or getattr(edgeasync, name.rpartition(".")[2])
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
    assert [each for each in examples if not each.options.get(doctest.SKIP)], "its docstring has no example"
    test = doctest.DocTest(examples, {}, name, None, None, None)
    told = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append)
    assert not told, "".join(told)
