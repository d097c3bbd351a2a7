"""The hub's core: events in, effects out. No arrays, I/O, clock or randomness."""
