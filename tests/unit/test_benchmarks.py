"""What the benchmarks share: which there are, which forms they have, and what a missed bound leads to."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import find_benchmarks, run_benchmark
from benchmarks.report import Form, Results, enforce_targets, make_parser

README = Path(__file__).parents[2] / "benchmarks" / "README.md"


def test_the_readme_names_every_benchmark_and_no_other():
    block = README.read_text().split("```")[1]
    named = re.findall(r"^python -m benchmarks\.(\w+)", block, re.MULTILINE)
    assert sorted(named) == find_benchmarks()


def test_a_benchmark_is_found_by_its_main_and_a_part_of_one_is_not(tmp_path):
    program = '"""A program."""\n\n\ndef main() -> None:\n    pass\n'
    files = {"fold": program, "fold_part": program, "folds": program, "shared": '"""No program."""\n'}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert find_benchmarks(tmp_path) == ["fold", "folds"]


def test_a_benchmark_that_fails_is_told_with_what_it_printed(capsys):
    assert not run_benchmark("fold", ["--what"], quietly=True)
    printed = capsys.readouterr().out
    assert "unrecognized arguments: --what" in printed
    assert re.search(r"^fold +[0-9.]+ s  exit code 2$", printed, re.MULTILINE)


@pytest.mark.parametrize(("flag", "form"), [("", Form.FULL), ("--short", Form.SHORT), ("--quick", Form.QUICK)])
def test_forms(flag, form):
    assert make_parser("").parse_args(flag.split()).form == form


@pytest.mark.parametrize(
    ("measured", "flags", "code"),
    [(10.0, [], None), (10.1, [], 1), (10.1, ["--short"], 1), (float("nan"), [], 1), (10.1, ["--quick"], None)],
)
def test_a_broken_bound_ends_in_1_and_a_quick_run_is_held_to_none(measured, flags, code, capsys):
    results = Results()
    results.bound("a device", measured, 10.0)
    try:
        enforce_targets(results, make_parser("").parse_args(flags))
        ended = None
    except SystemExit as end:
        ended = end.code
    assert ended == code
    assert ("a device: bound over measured" in capsys.readouterr().err) == (measured != 10.0)
