"""The gradient of Einstein summation: for each operand, a product of all others and the gradient."""

import string
from collections import Counter

import msgspec
import numpy as np

from edgeasync.autodiff.rules.registry import Gradients, Step, rule


class _Equation(msgspec.Struct, frozen=True):
    """An equation without ellipses: the letters of each operand and of the output."""

    operands: list[str]
    output: str

    def unused(self) -> list[str]:
        """Return letters that the equation does not contain."""
        used = {*"".join(self.operands), *self.output}
        return [letter for letter in string.ascii_letters if letter not in used]


@rule("Einsum")
def _einsum(step: Step) -> Gradients:
    equation = _read(step)
    places = range(len(equation.operands))
    return [_gradient_of(step, equation, place) if step.active(place) else None for place in places]


def _read(step: Step) -> _Equation:
    """Parse the equation, and replace ellipses by letters that it does not contain."""
    text = step.attribute("equation", "").replace(" ", "")
    left, arrow, output = text.partition("->")
    operands = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in text]
    counts = [len(step.shape(place)) - len(letters.replace("...", "")) for place, letters in enumerate(operands)]
    dots = "".join(free[: max(counts)])  # all ellipses have the same number of axes
    if not arrow:
        seen = Counter(left)
        output = "..." * ("..." in left)
        output += "".join(sorted(letter for letter in seen if letter.isalpha() and seen[letter] == 1))
    return _Equation([letters.replace("...", dots) for letters in operands], output.replace("...", dots))


def _gradient_of(step: Step, equation: _Equation, place: int) -> str:
    """Return the gradient of one operand.

    Along axes that only this operand has, and along which it was summed, the gradient is repeated.
    An operand's repeated letter selects a diagonal, outside of which the gradient is 0. Axes of
    size 1 that were broadcast are summed.
    """
    op = step.graph.op
    names, terms = list[str](), list[str]()
    for other in range(len(equation.operands)):
        if other != place:
            name, letters = _without_broadcast(step, equation, other)
            names.append(name)
            terms.append(letters)
    if equation.output:
        names.append(step.gradient)
        terms.append(equation.output)
    own = _own_letters(step, equation, place, names, terms)
    kept = "".join([letter for letter in own if letter in "".join(terms)])
    found = op("Einsum", *names, equation=f"{','.join(terms)}->{kept}") if names else step.gradient
    if names and not equation.output:
        found = op("Mul", found, step.gradient)
    if missing := [axis for axis, letter in enumerate(own) if not letter or letter not in kept]:
        found = op("Unsqueeze", found, step.graph.ints(*missing))
    if any(own[axis] for axis in missing):
        found = op("Expand", found, op("Shape", step.input(place)))
    return found


def _own_letters(step: Step, equation: _Equation, place: int, names: list[str], terms: list[str]) -> list[str]:
    """Return different letters for the axes of an operand, and "" for axes that were broadcast.

    For each repeated letter, an identity matrix is added to the product.
    """
    unused, broadcast, own = equation.unused(), _broadcast(step, equation, place), list[str]()
    for axis, (letter, size) in enumerate(zip(equation.operands[place], step.shape(place), strict=True)):
        if axis in broadcast:
            own.append("")
        elif letter not in own:
            own.append(letter)
        elif size is None:
            raise step.refused(f"its equation repeats the letter {letter!r} for the batch axis")
        else:
            own.append(unused.pop())
            names.append(step.graph.constant(np.eye(size, dtype=np.float32)))
            terms.append(letter + own[-1])
    return own


def _broadcast(step: Step, equation: _Equation, place: int) -> list[int]:
    """Return the axes of size 1 of an operand that another operand extends."""
    sizes = {
        letter: size
        for other, letters in enumerate(equation.operands)
        for letter, size in zip(letters, step.shape(other), strict=True)
        if size != 1
    }
    axes = zip(equation.operands[place], step.shape(place), strict=True)
    return [axis for axis, (letter, size) in enumerate(axes) if size == 1 and letter in sizes]


def _without_broadcast(step: Step, equation: _Equation, place: int) -> tuple[str, str]:
    """Return an operand and its letters, without axes that were broadcast."""
    axes, letters = _broadcast(step, equation, place), equation.operands[place]
    if not axes:
        return step.input(place), letters
    squeezed = step.graph.op("Squeeze", step.input(place), step.graph.ints(*axes))
    return squeezed, "".join([letter for axis, letter in enumerate(letters) if axis not in axes])
