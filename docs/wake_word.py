"""Draws the figures of examples/wake_word: `python -m docs.wake_word` writes docs/pictures/wake-word.svg."""

import json
from pathlib import Path
from statistics import fmean

from benchmarks.plot import Bars, draw_bars

FIGURES = sorted((Path(__file__).parent / "train").glob("wake_word-*.json"))
"""What `wake_word.py --json` wrote for each fleet."""

PICTURE = Path(__file__).parent / "pictures/wake-word.svg"
MODELS = {"shared": "one model for all", "personal": "personal heads", "published": "as published"}
HOMES = {"fleet": "fleet", "other homes": "others"}
COLUMNS = {"false alarms an hour": "alarms/h", "missed, %": "missed, %"}


def draw() -> str:
    """Draw false alarms and misses of the published classifier and of the trained ones."""
    fleets = [json.loads(file.read_text("utf-8")) for file in FIGURES]

    def mean(figure: str, column: str) -> float | None:
        values = [fleet[figure][column] for fleet in fleets if figure in fleet]
        return fmean(values) if values else None

    panels = {
        f"{words}: {unit}": {model: mean(f"{model}, {homes}", column) for model in MODELS}
        for homes, words in HOMES.items()
        for column, unit in COLUMNS.items()
    }
    note = (
        "Fleet: later recordings of homes that trained. Others: homes that never trained. Means of three fleets."
    )
    return draw_bars(Bars("A wake word before and after training", MODELS, panels, note))


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
