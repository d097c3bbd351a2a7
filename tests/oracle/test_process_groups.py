"""Ranks that train one module: their process group is noticed, and the session refuses."""

import multiprocessing
import traceback

import pytest

torch = pytest.importorskip("torch")

import edgeasync.torch
from edgeasync import Hub, join
from edgeasync.errors import ConfigError
from tests.support.programs.processes import PATIENCE_S

nn, dist = torch.nn, torch.distributed

RANKS = 2
REFUSED = f"this process is one of {RANKS} in a torch process group"


def make():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def before_the_group(rank, address, start_group):
    """Rank 0 joins, as a framework's trainer makes it, before the group begins."""
    module = make()
    with join(address, module, timeout_s=PATIENCE_S):
        start_group()
        train(nn.parallel.DistributedDataParallel(module))


def one_rank(rank, address, start_group):
    start_group()
    module = nn.parallel.DistributedDataParallel(make())
    if rank == 0:
        join(address, module, timeout_s=PATIENCE_S)
    train(module)


def every_rank(rank, address, start_group):
    start_group()
    join(address, nn.parallel.DistributedDataParallel(make()), timeout_s=PATIENCE_S)


def sharded(rank, address, start_group):
    from torch.distributed.fsdp import fully_shard

    start_group()
    module = make()
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    join(address, module, timeout_s=PATIENCE_S)


def train(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def run_rank(work, rank, address, store, said):
    def start_group():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)

    try:
        work(rank, address, start_group)
        said.send("")
    except ConfigError as error:
        said.send(str(error))
    except Exception:  # noqa: BLE001 - shown by the test
        said.send(traceback.format_exc())


@pytest.mark.parametrize(
    ("work", "refused"),
    [(before_the_group, [0, 1]), (one_rank, [0]), (every_rank, [0, 1]), (sharded, [0, 1])],
    ids=["join, then the group", "one rank", "every rank", "sharded"],
)
def test_ranks_that_would_drift_apart_are_refused(tmp_path, work, refused):
    context = multiprocessing.get_context("forkserver")  # the hub's threads forbid a fork of this process
    context.set_forkserver_preload(["edgeasync.torch"])
    with Hub(edgeasync.torch.model(make()), run=tmp_path / "run", bind="tcp://127.0.0.1:*") as hub:
        pipes = [context.Pipe() for _ in range(RANKS)]
        ranks = [
            context.Process(target=run_rank, args=(work, rank, hub.address, tmp_path / "store", pipes[rank][1]))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for rank in refused:
            assert pipes[rank][0].poll(PATIENCE_S)
            assert REFUSED in pipes[rank][0].recv()
        for process in ranks:
            process.kill()
            process.join()
        assert hub.status()["updates_applied"] == 0


def test_a_group_of_one_process_joins_with_the_names_of_the_plain_module(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = nn.parallel.DistributedDataParallel(make())
        hub = Hub(edgeasync.torch.model(make()), run=tmp_path / "run", bind="tcp://127.0.0.1:*")
        with hub, join(hub.address, module, timeout_s=PATIENCE_S) as session:
            train(module)
        assert session.steps == 1
    finally:
        dist.destroy_process_group()
