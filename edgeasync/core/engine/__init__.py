"""Engines connect frames to cores: they decode messages, run transfers and carry out effects. Still no I/O."""
