"""Operating system services: threads, clocks, shutdown, sensors, watched files and systemd."""
