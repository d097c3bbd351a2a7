"""Engines connect frames to cores: decode messages, run transfers, execute effects. No I/O."""
