"""Check the titles of the commits that follow the one that added this file. Merge commits are exempt.

A title has at most 72 characters, begins with a capital letter and does not end with a full stop. In a shallow
clone the check covers only the commits that follow the oldest one of the clone.
"""

import subprocess
import sys
from pathlib import Path

CHARACTERS_MAX = 72


def git(*arguments: str) -> list[str]:
    """Run git in this file's repository and return the lines that it prints."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603
    return done.stdout.decode(errors="replace").splitlines()


def faults(title: str) -> list[str]:
    """Return what is wrong with a title; an empty list if nothing is."""
    found = []
    if len(title) > CHARACTERS_MAX:
        found.append(f"has {len(title)} characters, at most {CHARACTERS_MAX} are allowed")
    if not title[:1].isupper():
        found.append("does not begin with a capital letter")
    if title.endswith("."):
        found.append("ends with a full stop")
    return found


def check() -> list[str]:
    """Return one line for each commit whose title has faults."""
    added = git("log", "--no-renames", "--diff-filter=A", "--format=%H", "--", Path(__file__).name)
    if not added:
        return []  # not committed yet
    log = git("log", "--no-merges", "--ancestry-path", "--format=%h %s", f"{added[-1]}..HEAD")
    lines = []
    for commit, _, title in (line.partition(" ") for line in log):
        if found := faults(title):
            lines.append(f"commit {commit}: title {', and '.join(found)}: {title!r}")
    return lines


if __name__ == "__main__":
    if bad := check():
        sys.exit("\n".join([*bad, "reword these titles with 'git rebase -i' (CONTRIBUTING.md, Commit)"]))
