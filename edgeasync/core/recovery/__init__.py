"""The hub's state as it is written down, and made again from the events that followed."""
