"""The device's core: events in, effects out. No arrays, I/O or clock."""
