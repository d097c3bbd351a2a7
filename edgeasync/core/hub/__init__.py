"""The hub decides here: events in, effects out. Scalars only; no array, no I/O, no clock, no randomness."""
