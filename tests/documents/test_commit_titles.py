"""The gate's check of commit titles, `.ci/commit_titles.py`, in repositories that the tests create."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.support.pages.documents import ROOT

PROGRAM = ROOT / ".ci/commit_titles.py"
SPEC = importlib.util.spec_from_file_location("commit_titles", PROGRAM)
commit_titles = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(commit_titles)

IDENTITY = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")


class Repository:
    """A git repository in a folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def git(self, *arguments):
        subprocess.run(["git", *IDENTITY, *arguments], cwd=self.folder, check=True, capture_output=True)

    def commit(self, title):
        self.git("commit", "--quiet", "--allow-empty", "-m", title)

    def add_check(self):
        (self.folder / ".ci").mkdir()
        shutil.copy(PROGRAM, self.folder / ".ci")
        self.git("add", ".ci")
        self.commit("Check commit titles")

    def check(self):
        """Return the exit code of the check and the lines that it prints."""
        program = self.folder / ".ci" / PROGRAM.name
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.splitlines()


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path / "repository")
    made.git("init", "--quiet", "-b", "main")
    made.commit("an old title that ends with a full stop.")
    return made


@pytest.mark.parametrize("title", ["Add a codec", "A" * 72, "Évaluer", "Use the field's verb: e.g. retry"])
def test_good_titles_pass(title):
    assert commit_titles.faults(title) == []


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("A" * 73, "has 73 characters"),
        ("add a codec", "capital"),
        ("`Add` it", "capital"),
        ("", "capital"),
        ("Add it.", "full stop"),
    ],
)
def test_bad_titles_fail(title, words):
    assert any(words in fault for fault in commit_titles.faults(title))


def test_only_commits_after_the_check_count(repository):
    repository.add_check()
    assert repository.check() == (0, [])
    repository.commit("Add a codec")
    assert repository.check() == (0, [])
    repository.commit("add a codec.")
    code, lines = repository.check()
    assert code == 1
    assert len(lines) == 2
    assert lines[0].endswith(
        "title does not begin with a capital letter, and ends with a full stop: 'add a codec.'"
    )


def test_merges_and_branches_from_before_the_check_are_exempt(repository):
    repository.git("branch", "older")
    repository.add_check()
    repository.git("checkout", "--quiet", "older")
    repository.commit("an older branch")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "-m", "merge a branch.", "older")
    assert repository.check() == (0, [])


def test_a_shallow_clone_covers_the_commits_that_it_has(repository, tmp_path):
    repository.add_check()
    repository.commit("bad.")
    for title in ("Good", "Better"):
        repository.commit(title)
    clones = {}
    for depth in (1, 2, 4):
        clones[depth] = Repository(tmp_path / f"depth{depth}")
        url = repository.folder.as_uri()
        clones[depth].git("clone", "--quiet", "--depth", str(depth), url, ".")
    assert [clones[depth].check()[0] for depth in (1, 2, 4)] == [0, 0, 1]


def test_an_uncommitted_check_has_nothing_to_check(repository):
    (repository.folder / ".ci").mkdir()
    shutil.copy(PROGRAM, repository.folder / ".ci")
    assert repository.check() == (0, [])
