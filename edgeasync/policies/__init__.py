"""How the hub decides: small frozen values, named in TOML by `kind`, composed and never inherited.

>>> from edgeasync import Policy
>>> from edgeasync.policies.aggregation import ImmediateAggregator
>>> from edgeasync.policies.frequency import FixedFrequency
>>> policy = Policy(aggregate=ImmediateAggregator(), frequency=FixedFrequency(local_steps=16))
>>> policy.frequency
FixedFrequency(local_steps=16)
"""
