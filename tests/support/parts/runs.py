"""Runs that are opened as a hub opens them, without devices."""

import numpy as np

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy

SPEC = ParameterSpec((Parameter("weights", (3,)),))
RULES = Rules(SPEC, Policy(), HubCoreSettings())


def open_run(disk, rules=RULES, *, lineage="a" * 16, **options):
    run = HubRun(disk, rules, **options)
    run.open(
        Rules.make_core,
        lambda: (np.zeros(3, np.float32), 0),
        lineage=lineage,
        draw_session=lambda: bytes(16),
        created_s=0.0,
    )
    return run
