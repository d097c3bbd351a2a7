"""Kill a hub during training and resume it: no update is lost or counted twice.

python kill_and_resume.py --kills 3
"""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from edgeasync import Agent, Hub, Run, fetch_status, nn
from edgeasync.data import load_digits

RUN = "runs/killed"


def serve(told: Connection, address: str) -> None:
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with Hub(network, input_shape=(64,), run=RUN, bind=address) as hub:
        told.send(hub.address)
        told.recv()  # blocks until the parent says to end, or kills it
        hub.finish("enough")
        hub.wait()


def start(address: str) -> tuple[SpawnProcess, Connection, str]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there, address))
    process.start()
    return process, here, here.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a hub, and see it resume.")
    parser.add_argument("--kills", type=int, default=3, help="how often")
    kills = parser.parse_args().kills

    hub, told, address = start("tcp://127.0.0.1:*")
    with Agent(address, load_digits(), workers=2) as agent:
        for number in range(1, kills + 2):
            while agent.updates_answered < 50 * number:
                time.sleep(0.01)
            if number > kills:
                break
            hub.kill()  # SIGKILL: the hub cannot write anything more
            hub.join()
            answered = agent.updates_answered
            hub, told, _ = start(address)
            status = fetch_status(address)
            known = sum(status[f"updates_{each}"] for each in ("applied", "buffered", "rejected"))
            print(f"killed: it had answered {answered} updates; started again, it knows of {known}", flush=True)
        told.send("end")
        print(agent.wait())
        answered = agent.updates_answered
    hub.join()

    history = Run.open(RUN).history
    distinct = len({*zip(history["device"].tolist(), history["update"].tolist(), strict=True)})
    print(f"{answered} updates answered, {len(history)} decided, {distinct} of them different")


if __name__ == "__main__":
    main()
