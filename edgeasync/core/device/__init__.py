"""The device's decisions: events in, effects out. Scalars only; no arrays, no I/O, no clock."""
