"""Make recordings of simulated homes, as embeddings: one file per home, home-0.npz and so on.

    python record.py FOLDER

Each home records talk and calls of the wake word for training, and others later. Takes about
four minutes on two cores.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from features import Embedder
from homes import Home, Room, make_homes
from voices import Espeak


def record(home: Home, arguments: argparse.Namespace) -> None:
    espeak, embedder = Espeak(), Embedder()
    arrays = {}
    for part, minutes, calls in zip(("", "later_"), arguments.minutes, arguments.calls, strict=True):
        room = Room(home, espeak.say, [arguments.seed, home.number, len(part)])
        arrays[f"{part}talk"] = np.array([embedder.embed(room.talk()) for _ in range(minutes)])
        arrays[f"{part}calls"] = np.array([embedder.embed(room.call()) for _ in range(calls)])
    np.savez(arguments.folder / f"home-{home.number}.npz", allow_pickle=False, **arrays)
    print(f"home {home.number}: {', '.join(home.names)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make recordings of simulated homes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--homes", type=int, default=12)
    parser.add_argument("--minutes", type=int, nargs=2, default=[15, 30], help="of talk, for training and later")
    parser.add_argument("--calls", type=int, nargs=2, default=[60, 150], help="for training and later")
    parser.add_argument("--seed", type=int, default=2, help="of people, rooms and sentences")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    homes = make_homes(arguments.homes, arguments.seed)
    with ProcessPoolExecutor(max_tasks_per_child=1) as processes:
        list(processes.map(record, homes, [arguments] * len(homes)))


if __name__ == "__main__":
    main()
