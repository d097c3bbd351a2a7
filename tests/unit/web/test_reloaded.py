"""Values that are read from files, and read again when the files change."""

import pytest

from edgeasync.errors import StorageError
from edgeasync.web.reloaded import CHECK_S, Reloaded


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Text:
    """A file whose text must not be empty, read by a `Reloaded`."""

    def __init__(self, folder):
        self.file = folder / "file"
        self.clock = Clock()
        self.reads, self.errors = 0, []
        self.reloaded = Reloaded("first", [self.file], self.read, self.on_error, clock=self.clock)

    def read(self):
        self.reads += 1
        if not self.file.exists() or not (text := self.file.read_text()):
            raise StorageError("no text")
        return text

    def on_error(self, error, before):
        self.errors.append(str(error))
        return f"{before} or not"

    def later(self):
        self.clock.now_s += CHECK_S
        return self.reloaded()


@pytest.fixture
def text(tmp_path):
    return Text(tmp_path)


def test_a_file_is_read_again_only_after_a_change(text):
    text.file.write_text("one")
    assert [text.later() for _ in range(3)] == ["one"] * 3
    assert text.reads == 1
    text.file.write_text("three")
    assert [text.later() for _ in range(3)] == ["three"] * 3
    assert text.reads == 2


def test_a_change_is_seen_a_second_later_at_most(text):
    text.file.write_text("one")
    assert text.reloaded() == "one"
    text.file.write_text("three")
    assert text.reloaded() == "one"
    text.clock.now_s += CHECK_S
    assert text.reloaded() == "three"


def test_a_file_that_cannot_be_used_is_reported_once_and_read_until_it_can(text):
    text.file.write_text("one")
    assert text.later() == "one"
    text.file.write_text("")
    assert [text.later() for _ in range(3)] == ["one or not"] * 3
    assert (text.errors, text.reads) == (["no text"], 4)
    text.file.write_text("two")
    assert text.later() == "two"
    text.file.unlink()
    assert text.later() == "two or not"
    assert text.errors == ["no text"] * 2


def test_a_change_since_the_value_was_read_for_the_first_time_is_seen(text):
    text.file.write_text("second")
    assert text.reloaded() == "second"
