"""The pages and pictures of measured results are what the records in benchmarks/results say."""

import re
from xml.etree import ElementTree as ET

import pytest

from benchmarks.__main__ import find_benchmarks
from benchmarks.plot import BEGIN, DOCS, END, JUDGED, RULES, SCENARIO, draw_bars, draw_ratios, make_files
from benchmarks.plot import time_to_target as bars_of_policies
from benchmarks.plot_curves import draw_curves
from benchmarks.plot_curves import scale as curves_of_scale
from benchmarks.policies import EFFORTS
from benchmarks.records import RESULTS, read_records
from benchmarks.report import Form
from tests.support.pages.results import made

RECORDS = read_records()
FILES = make_files(RECORDS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_page_or_picture_is_what_its_record_says(path):
    assert path.read_text("utf-8") == FILES[path], "run python -m benchmarks plot"


@pytest.mark.parametrize("name", find_benchmarks())
def test_every_benchmark_has_a_page_that_says_whether_it_was_measured(name):
    page = (DOCS / "results" / f"{name}.md").read_text("utf-8")
    assert page.startswith(f"# `{name}`: ")
    part = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert part.startswith("## Measured" if name in RECORDS else "There is no stored measurement yet.")


def test_no_page_picture_or_record_is_left_over():
    names = set(find_benchmarks())
    assert {page.stem for page in (DOCS / "results").glob("*.md")} == names | {"index", "benchmarks"}
    assert set((DOCS / "results").glob("*.svg")) <= set(FILES)
    assert {path.stem for path in RESULTS.glob("*.json")} == set(RECORDS) <= names


@pytest.fixture
def docs(tmp_path):
    """Return a folder of pages: an index, and one page with words around its part."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/index.md").write_text(f"# Results\n\n{BEGIN}\n\n{END}\n")
    (tmp_path / "results/fold.md").write_text(
        f"# `fold`: folds\n\nBefore.\n\n{BEGIN}\n\nOld.\n\n{END}\n\nAfter.\n"
    )
    return tmp_path


def test_the_part_between_the_marks_is_made_from_the_record(docs):
    page = make_files({"fold": made()}, docs)[docs / "results/fold.md"]
    assert page.startswith(f"# `fold`: folds\n\nBefore.\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nAfter.\n")
    assert "Old." not in page
    for line in (
        "| measured | 2026-11-23, short run of 61.5 s |",
        "| commit | `0123456`, with changes that were not committed |",
        "| machine | 2 cores: Some CPU, 8 GiB, Linux 6.1 x86_64 |",
        "| load before | cores busy 0.25, average 1.50 |",
        "| disk | file system: ext4, kind: NVMe |",
        "| versions | python 3.11.7, numpy 2.4.0 |",
        "git checkout 0123456",
        "python -m benchmarks run --only fold --short",
        "![fold: the figures below](fold-ratios.svg)",
        "| good | 2.50 | 1 |  |",
        "| short of it | 0.50 | 0.75 | below |",
        "| a difference | -0.25 | -0.50 |  |",
        "| without target | 12 |  |  |",
        "| ms | ours | theirs |",
        "| one \\| two | 1.25 | 1,234 |",
        "| three |  | 7 |",
    ):
        assert line in page.splitlines()
    (docs / "results/fold.md").write_text(page)
    assert make_files({"fold": made()}, docs)[docs / "results/fold.md"] == page


def test_a_full_run_of_a_clean_commit_is_repeated_as_such(docs):
    page = make_files({"fold": made(form="full", commit="0123456")}, docs)[docs / "results/fold.md"]
    assert "| commit | `0123456` |" in page
    assert "\npython -m benchmarks run --only fold\n" in page


def test_without_a_record_a_page_is_left_as_it_is(docs):
    files = make_files({}, docs)
    assert list(files) == [docs / "results/index.md"]
    row = "| [fold](fold.md) | folds |  | There is no stored measurement yet. |"
    assert row in files[docs / "results/index.md"]


def test_the_list_counts_the_targets_that_are_reached(docs):
    index = make_files({"fold": made()}, docs)[docs / "results/index.md"]
    assert "| [fold](fold.md) | folds | 2 of 3 | 2026-11-23, short run, `0123456-dirty` |" in index


def test_ratios_are_dots_beside_their_targets():
    record = made(ratios={**made().ratios, "not finite": None, "<&>": 1.0})
    drawn = draw_ratios(record)
    shown = ET.fromstring(drawn)
    dots = [dot for dot in shown.iter() if dot.tag.endswith("circle")]
    words = [words.text for words in shown.iter() if words.tag.endswith("text")]
    assert {"good", "short of it", "a difference", "without target", "<&>"} <= set(words)
    assert {"2.50 (at least 1)", "0.50 (at least 0.75)", "-0.25 (at least -0.50)", "12"} <= set(words)
    assert "not finite" not in words
    assert [dot.get("fill") == "#b3402a" for dot in dots] == [False, True, False, False]
    assert float(dots[0].get("cx")) > float(dots[3].get("cx")) > float(dots[1].get("cx"))


def test_the_picture_of_the_readme_is_drawn_from_policies():
    rows = {f"{rule} (a setting)": {"s": 2.0 + number, "MB": 10.0} for number, rule in enumerate(RULES)}
    record = made(benchmark="policies", figures={SCENARIO: rows})
    drawn = draw_bars(bars_of_policies(record))
    ET.fromstring(drawn)
    assert all(f">{words}</text>" in drawn for words in RULES.values())
    assert all(f">{2 + number}</text>" in drawn for number in range(len(RULES)))
    widths = [float(width) for width in re.findall(r'width="([0-9.]+)" height="18"', drawn)]
    assert widths[::2] == sorted(widths[::2])
    assert "medians of 3 seeds" in drawn


@pytest.mark.parametrize("form", ["full", "short"])
def test_the_picture_says_on_how_many_seeds(form):
    effort = EFFORTS[Form(form)]
    assert f"medians of {len(effort.judging)} seeds" in JUDGED[form]
    assert ("not tuned" in JUDGED[form]) == (not effort.tuning)


def test_the_picture_of_scale_has_a_line_for_each_cost():
    sizes = {"20 devices": 20.0, "10,000 devices": 40.0}
    connections = {"20 connections": 200.0, "2,000 connections": 220.0}
    record = made(
        benchmark="scale",
        figures={
            "the core alone, mean": {
                size: {"push, us": us, "ping, us": 7.0, "flush, us": 10 * us} for size, us in sizes.items()
            },
            "the core alone, slowest": {size: {"push, ms": 1.0, "flush, ms": us} for size, us in sizes.items()},
            "joins and pings, real sockets": {
                size: {"hub CPU a ping, us": 150.0, "lag p99, ms": 0.5} for size in connections
            },
            "pushes of 4 KB, real sockets": {
                size: {"hub CPU a push, us": us, "slowest event, ms": 0.0, "lag p99, ms": 6.0}
                for size, us in connections.items()
            },
        },
    )
    shown = ET.fromstring(draw_curves(curves_of_scale(record)))
    lines = [line.get("points").split() for line in shown.iter() if line.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [2] * 9  # the sockets' slowest event, 0, has no place on the scale
    (left, low), (right, high) = (map(float, point.split(",")) for point in lines[1])
    assert left < right
    assert low > high
    words = [words.text for words in shown.iter() if words.tag.endswith("text")]
    assert {"push", "flush", "push, sockets", "lag p99, pings", "100", "10,000"} <= set(words)
