"""Engines connect frames to cores: messages, transfers and effects. No I/O."""
