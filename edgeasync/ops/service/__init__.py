"""An agent or a hub as a service of systemd: its unit, what installs it, and the environments it runs from."""
