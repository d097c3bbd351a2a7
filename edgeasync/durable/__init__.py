"""Files that outlive a process: a hub's journal and checkpoints, keys, and a device's state."""
