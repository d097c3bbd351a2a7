"""The CSV log: one line per event."""

import csv

import pytest

from edgeasync.callbacks import CSVLog
from edgeasync.errors import ConfigError
from tests.support.parts.events import END, evaluation, exchange, update


def test_a_log_has_a_line_for_each_event_and_is_continued(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    for _ in range(2):
        log = CSVLog(path)
        for event in (update(1), evaluation(0.25, 0.5), exchange(None), END):
            log(event)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["event"] for line in lines] == ["update", "evaluation", "exchange", "end"] * 2
    assert (lines[0]["device"], lines[0]["loss"], lines[0]["accuracy"]) == ("a", "0.5", "")
    assert (lines[1]["accuracy"], lines[2]["bytes_down"], lines[3]["reason"]) == ("0.5", "200", "done")


def test_a_file_of_something_else_is_left_as_it_is(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="not a file written by CSVLog"):
        CSVLog(path)(END)
    assert path.read_text() == "a,b\n1,2\n"
