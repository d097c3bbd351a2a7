"""Draws the transition tables of the code: `python -m tests.support.state_diagrams` writes docs/states.md."""

import re
from pathlib import Path

from edgeasync.core.device.machine import LINK
from edgeasync.core.device.work import WORK
from edgeasync.core.hub.membership import MEMBER
from edgeasync.protocol.transfers import TRANSFER

DOCUMENT = Path(__file__).parents[2] / "docs/states.md"
TABLES = {"link": LINK, "work": WORK, "member": MEMBER, "transfer": TRANSFER}


def diagram(table):
    """Return a table as a Mermaid state diagram."""
    moves = [f"    {state} --> {after}" for state, following in table.items() for after in following]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {next(iter(table))}", *moves])


def drawn(text):
    """Return the document with every diagram as the code has it; each stands behind `<!-- NAME -->`."""
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n\n```mermaid\n{diagram(table)}\n```"
        text, count = re.subn(rf"<!-- {name} -->\n\n```mermaid\n.*?```", block, text, flags=re.DOTALL)
        assert count == 1, f"{DOCUMENT} has {count} diagrams of {name}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text()))
