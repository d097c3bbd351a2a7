"""A service of systemd that runs an agent, a hub or a peer: its unit, what installs it, and its environments."""
