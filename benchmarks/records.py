"""The files of benchmarks/results: one for each benchmark, with what it found and what it ran on.

`python -m benchmarks run` writes them, and `python -m benchmarks plot` makes pages and pictures of them.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

RESULTS = Path(__file__).parent / "results"

Table = dict[str, dict[str, float | None]]
"""Row name -> column name -> number, `None` for one that is not finite; rows may lack columns."""


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """What one run of a benchmark found. `seconds` is how long it took; `load` and `disk` are from before it."""

    benchmark: str
    form: Literal["full", "short"]
    date: str
    seconds: float
    commit: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    load: dict[str, float]
    disk: dict[str, str]
    ratios: dict[str, float | None]
    targets: dict[str, float]
    figures: dict[str, Table]

    def missed(self) -> list[str]:
        """Return the names of the ratios that are below their targets."""
        ratios = self.ratios
        return [name for name, target in self.targets.items() if (ratio := ratios[name]) is None or ratio < target]


def make_record(printed: dict[str, Any], **surroundings: Any) -> Record:
    """Join what a benchmark printed and what it ran on. It raises `msgspec.ValidationError` for a quick run."""
    found = {name: printed.get(name) for name in ("form", "ratios", "targets", "figures")}
    return msgspec.convert(surroundings | found, Record)


def write_record(record: Record, folder: Path) -> Path:
    """Write a record, so that its file holds the old one or the new one at any time. Return its path."""
    folder.mkdir(exist_ok=True)
    half = folder / f".{record.benchmark}.json"
    half.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return half.replace(folder / f"{record.benchmark}.json")


def read_records(folder: Path = RESULTS) -> dict[str, Record]:
    """Return all records by the names of their benchmarks."""
    records = (msgspec.json.decode(path.read_bytes(), type=Record) for path in sorted(folder.glob("[!.]*.json")))
    return {record.benchmark: record for record in records}
