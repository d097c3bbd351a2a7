"""Read and write benchmarks/results: one file per benchmark, with figures and machine.

`python -m benchmarks run` writes them. `python -m benchmarks plot` generates pages and pictures
from them.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

RESULTS = Path(__file__).parent / "results"

Table = dict[str, dict[str, float | None]]
"""Row name -> column name -> number; `None` if it is not finite. Rows may lack columns."""


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """The results of one run of a benchmark.

    `seconds` is its duration. `load` and `disk` were measured before it.
    """

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
    lists: dict[str, dict[str, dict[str, str]]] = {}

    def missed(self) -> list[str]:
        """Return the names of the ratios that miss their targets."""
        ratios = self.ratios
        return [name for name, target in self.targets.items() if (ratio := ratios[name]) is None or ratio < target]


def make_record(printed: dict[str, Any], **surroundings: Any) -> Record:
    """Combine a benchmark's output with what it ran on.

    Raises `msgspec.ValidationError` for a quick run.
    """
    names = ("form", "ratios", "targets", "figures", "lists")
    found = {name: printed[name] for name in names if name in printed}
    return msgspec.convert(surroundings | found, Record)


def write_record(record: Record, folder: Path) -> Path:
    """Write a record atomically; return its path."""
    folder.mkdir(exist_ok=True)
    half = folder / f".{record.benchmark}.json"
    half.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return half.replace(folder / f"{record.benchmark}.json")


def read_records(folder: Path = RESULTS) -> dict[str, Record]:
    """Return all records by benchmark name."""
    records = (msgspec.json.decode(path.read_bytes(), type=Record) for path in sorted(folder.glob("[!.]*.json")))
    return {record.benchmark: record for record in records}
