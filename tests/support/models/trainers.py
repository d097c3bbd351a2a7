"""Trainers of training graphs, by the keys of `[local]`."""

from edgeasync.policies.optimizers import SGD
from edgeasync.training.onnx_trainer import OnnxTrainer
from edgeasync.training.plan import LocalTraining

PLAIN = (SGD(),)


def onnx_trainer(graph, spec, data, optimizer=PLAIN, *, seed=0, threads=1, provider="auto", machine=None, **local):
    training = LocalTraining(optimizer=tuple(optimizer), **local)
    return OnnxTrainer(graph, spec, data, training, seed=seed, threads=threads, provider=provider, machine=machine)
