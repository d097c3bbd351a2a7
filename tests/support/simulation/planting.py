"""Plants bugs in the product, to see whether the checkers would notice: a test of the test.

A mutant is a method with a few words changed. It names the words. So if the code has changed and they are gone, it
fails as loudly as a mutant that is not noticed.
"""

import inspect
import json
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


@dataclass(frozen=True)
class Change:
    """Words of a method, or of a function as a module knows it, and the words that replace them."""

    owner: type | ModuleType
    method: str
    old: str
    new: str


class Mutants(NamedTuple):
    """Bugs to plant: the changes that make each of them, by its name."""

    changes: dict

    seeds_file: Path
    """A seed that notices each bug, to be tried first. `python -m tests.simulation --planted` looks for them."""

    seeds_max: int
    """How many seeds may pass before a planted bug is noticed."""

    def seeds(self):
        """Return the seed that notices each bug."""
        return json.loads(self.seeds_file.read_text("utf-8"))

    def is_noticed(self, name, run):
        """Whether one of the first seeds fails while a bug is planted."""
        with self.planted(name):
            return any(run(seed).failure for seed in (self.seeds()[name], *range(self.seeds_max)))

    @contextmanager
    def planted(self, name):
        """Plant a bug for a while."""
        with ExitStack() as stack:
            methods = {}
            for change in self.changes[name]:
                methods.setdefault((change.owner, change.method), []).append(change)
            for (owner, method), changes in methods.items():
                mutant = _mutated(owner, method, changes)
                stack.callback(setattr, owner, method, vars(owner)[method])
                setattr(owner, method, mutant)
            yield


def _mutated(owner, method, changes):
    function = inspect.unwrap(vars(owner)[method])
    known = function.__globals__
    source = textwrap.dedent(inspect.getsource(function))
    for change in changes:
        if source.count(change.old) != 1:
            raise LookupError(f"{owner.__name__}.{method} has not just one {change.old!r}: correct the mutant")
        source = source.replace(change.old, change.new)
    names = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), known, names)
    return names[method]
