"""Hubs in virtual time, started."""

import numpy as np

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.policy import Policy
from simulation.hub import SimulatedHub


def simulated_hub(clock, model, policy=None, *, settings=None, seed=0, initial=None, **more):
    """Start a hub of a model, or of a spec whose first values are zeros."""
    spec = model if isinstance(model, ParameterSpec) else model.spec
    if initial is None:
        initial = np.zeros(spec.length, np.float32) if spec is model else model.initial(0)
    hub = SimulatedHub(
        clock,
        spec=spec,
        initial=initial,
        policy=policy or Policy(),
        settings=settings or HubCoreSettings(),
        seed=seed,
        **more,
    )
    hub.start()
    return hub
