"""Which flags follow from the message of a failed build."""

from edgeasync.autodiff.settings import NEXT_ERROR, GraphSettings, advised_flags, patterns_for
from edgeasync.errors import argument


def test_flags_of_all_errors_in_turn():
    """Advice to freeze adds to what is frozen, and replaces other advice of the same error."""
    parts = [
        f"several outputs; choose one: {argument('output', 'scores')}",
        f"no gradient; {argument('train', 'b')}, or {argument('freeze', 'a.*', 'c')}",
        f"no gradient; {argument('freeze', 'd')}",
    ]
    given = GraphSettings(loss="mse", freeze=("z",))
    assert advised_flags(given, "m.onnx: " + NEXT_ERROR.join(parts)) == [
        *("--loss", "mse", "--freeze", "z", "--freeze", "a.*", "--freeze", "c", "--freeze", "d"),
        *("--output", "scores"),
    ]


def test_no_flags_if_an_error_remains():
    parts = [f"several outputs; choose one: {argument('output', 'scores')}", "no gradient; use other operators"]
    assert advised_flags(GraphSettings(loss="mse"), NEXT_ERROR.join(parts)) == []


def test_many_names_become_patterns_that_match_no_other_name():
    blocks = [f"blocks.{block}.{name}" for block in range(5) for name in ("weight", "bias")]
    assert patterns_for([*blocks, "a[0].w", "stem"], ["head.w", "a[0].b"]) == ["blocks.*", "a[0].w", "stem"]
    assert patterns_for([*blocks[:8], "b"], blocks[8:]) == [*(f"blocks.{n}.*" for n in range(4)), "b"]
    assert patterns_for(blocks[:8], []) == blocks[:8]
