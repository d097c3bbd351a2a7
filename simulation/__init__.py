"""Hub and devices under a virtual clock: their own cores and real encoded frames, no sockets, no waiting.

>>> import numpy as np
>>> from edgeasync import SGD, Dataset, GradientTrainer, Policy
>>> from edgeasync.core.hub.settings import HubCoreSettings
>>> from edgeasync.data import batches
>>> from simulation.clock import VirtualClock
>>> from simulation.fleet import SimulatedDevice
>>> from simulation.hub import SimulatedHub
>>> from simulation.link import LinkProfile
>>> from edgeasync.training.numpy_models import SoftmaxModel
>>> model, clock = SoftmaxModel(inputs=4, classes=2), VirtualClock()
>>> hub = SimulatedHub(
...     clock, spec=model.spec, initial=model.initial(0), policy=Policy(), settings=HubCoreSettings(), seed=0
... )
>>> hub.start()
>>> stream = batches(Dataset.of(np.eye(4), [0, 1, 0, 1]), 2, seed=0)
>>> trainer = GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], stream)
>>> SimulatedDevice(hub, "device-1", trainer, step_s=0.01, link=LinkProfile(delay_s=0.05)).start()
>>> clock.run(lambda: hub.core.updates_applied >= 100, limit_s=3600.0)
True
"""
