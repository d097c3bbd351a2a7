"""What outlives a process: whole files, a hub's journal and checkpoints, a device's spool."""
