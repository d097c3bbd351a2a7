"""Make recordings of simulated homes, as embeddings: one file per home, home-0.npz and so on.

    python record.py FOLDER --homes 12 --seed 1

Each home records talk and calls of the wake word for training, and others later. Takes 20 minutes.
"""

import argparse
from pathlib import Path

import numpy as np
from features import Embedder
from homes import Room, make_homes
from voices import Espeak


def main() -> None:
    parser = argparse.ArgumentParser(description="Make recordings of simulated homes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--homes", type=int, default=12)
    parser.add_argument("--first", type=int, default=0, help="number of the first home to record")
    parser.add_argument("--minutes", type=int, nargs=2, default=[15, 30], help="of talk, for training and later")
    parser.add_argument("--calls", type=int, nargs=2, default=[60, 150], help="for training and later")
    parser.add_argument("--seed", type=int, default=1, help="of people, rooms and sentences")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    espeak, embedder = Espeak(), Embedder()
    for home in make_homes(arguments.homes, arguments.seed)[arguments.first :]:
        arrays = {}
        for part, minutes, calls in zip(("", "later_"), arguments.minutes, arguments.calls, strict=True):
            room = Room(home, espeak.say, [arguments.seed, home.number, len(part)])
            arrays[f"{part}talk"] = np.array([embedder.embed(room.talk()) for _ in range(minutes)])
            arrays[f"{part}calls"] = np.array([embedder.embed(room.call()) for _ in range(calls)])
        np.savez(arguments.folder / f"home-{home.number}.npz", allow_pickle=False, **arrays)
        print(f"home {home.number}: {', '.join(home.names)}")


if __name__ == "__main__":
    main()
