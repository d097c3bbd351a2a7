"""Phrases that read like a translation, and what plain English says instead.

`python -m tests.support.pages.tics` lists the phrases in all covered files.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

TICS = {
    r"\b(?:go|goes|going|gone|went) on\b": "continue, resume, keep: 'the hub resumes the run'",
    r"\b(?:take|takes|taking|taken|took) in\b": "receive, accept, count: 'the hub receives an update'",
    r"\bso many\b": "name the number: 'after `patience` evaluations', 'this number of updates'",
    r"\bwhoever\b": "name who: 'if you run a hub', 'anyone who reaches the port'",
    r"\banew\b": "again, from scratch, a new one",
    r"\bunder way\b": "in progress, in flight, running",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair, correct",
    r"\bnone (?:but|is|are|was|were|has|have|can|may|does|do|other|yet)\b": "no update, not one, only: name it",
    r"\b(?:is|are|be) no numbers?\b": "not finite; NaN or infinite",
    # At the beginning of a sentence, a comment or a cell, but not of a heading or a question.
    r"(?:^\s*(?:#\s|\"\"\")?|[.:;!?)]\s|\|\s)What (?:is|was|are|were) (?![^.|]*\?)": (
        "begin with the thing: 'Updates that wait are folded'"
    ),
}
"""Pattern -> what to write. A space in a pattern may be a line's end."""

EXAMPLES = {"tics.py", "test_english.py"}
"""Files that name the phrases themselves."""

COVERED = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "devices").iterdir() if path.is_file()),
    *sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()),
    *sorted(
        path
        for folder in ("benchmarks", "edgeasync", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".toml"} and path.name not in EXAMPLES
    ),
]


def found(path):
    """Return line number, phrase and advice for every tic of a file."""
    text = path.read_text("utf-8")
    hits = []
    for pattern, advice in TICS.items():
        spaced = pattern.replace(" ", r"(?:\s+(?:#\s)?)")
        flags = re.MULTILINE if "What" in pattern else re.IGNORECASE | re.MULTILINE
        hits += [
            (text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), advice)
            for match in re.finditer(spaced, text, flags)
        ]
    return sorted(hits)


if __name__ == "__main__":
    for covered in COVERED:
        for line, phrase, advice in found(covered):
            sys.stdout.write(f"{covered.relative_to(ROOT)}:{line}: {phrase!r}: {advice}\n")
