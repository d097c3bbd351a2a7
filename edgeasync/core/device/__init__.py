"""The device's core: events in, effects out, with scalars only and no I/O or clock."""
