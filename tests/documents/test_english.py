"""What people read is plain English: no phrase of the list of tics."""

import pytest

from tests.support.pages.tics import COVERED, ROOT, TICS, found


@pytest.mark.parametrize("path", COVERED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_reads_like_a_translation(path):
    hits = [f"line {line}: {phrase!r}: {advice}" for line, phrase, advice in found(path)]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    "sentence",
    [
        "A folder that holds a run already is gone on with.",
        "What a silent device does not take\nin makes way.",
        "After so\n    # many updates.",
        "Whoever follows it.",
        "It begins anew.",
        "The step under way.",
        "Waiting does not mend it.",
        "It waits. What is left counts.",
        "| What is left |",
        "While none is there.",
        "Its losses are no numbers.",
    ],
)
def test_every_tic_is_noticed(sentence, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(sentence)
    assert found(page)


@pytest.mark.parametrize(
    "sentence",
    ["It goes only once.", "## What is in the folder", "Tell what is wrong.", "| none |", "What is a hub?"],
)
def test_plain_sentences_pass(sentence, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(sentence)
    assert not found(page)


def test_every_tic_has_advice():
    assert all(TICS.values())
