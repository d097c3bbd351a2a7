"""What the benchmarks share: which there are, which forms they have, what a missed bound leads to, and records."""

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import find_benchmarks, parse, run_benchmark
from benchmarks.records import Record, make_record, read_records, write_record
from benchmarks.report import Results, enforce_targets, make_parser
from tests.support.pages.results import made

README = Path(__file__).parents[3] / "benchmarks" / "README.md"


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
    assert not run_benchmark("scale", ["--what"], quietly=True)
    printed = capsys.readouterr().out
    assert "unrecognized arguments: --what" in printed
    assert re.search(r"^scale +[0-9.]+ s  exit code 2$", printed, re.MULTILINE)


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("run --all --quick", "the figures of a quick run mean nothing"),
        ("run --only scale --quick", "the figures of a quick run mean nothing"),
        ("run", "one of the arguments --all --only is required"),
        ("run --all --only scale", "not allowed with"),
        ("run --only train_step_speed", "invalid choice"),
    ],
)
def test_what_a_run_refuses(arguments, reason, capsys):
    with pytest.raises(SystemExit) as end:
        parse(arguments.split())
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_quick_run_is_no_record():
    printed = {name: getattr(made(), name) for name in ("form", "ratios", "targets", "figures")}
    rest = {name: getattr(made(), name) for name in Record.__struct_fields__ if name not in printed}
    assert make_record(printed, **rest) == made()
    with pytest.raises(msgspec.ValidationError, match="quick"):
        make_record(printed | {"form": "quick"}, **rest)


def test_a_ratio_that_is_not_finite_misses_its_target(tmp_path):
    ratios = {"a": float("nan"), "b": -0.5, "c": 0.9}
    write_record(made(ratios=ratios, targets={"a": -1.0, "b": -1.0, "c": 1.0}), tmp_path)
    record = read_records(tmp_path)["fold"]
    assert record.ratios == {"a": None, "b": -0.5, "c": 0.9}
    assert record.missed() == ["a", "c"]
