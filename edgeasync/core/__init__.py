"""The two state machines, hub and device, and the model's arithmetic: no I/O, no clock, no randomness."""
