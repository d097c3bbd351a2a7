"""What a process asks of its machine: threads, clocks, shutdown, sensors, files that change, systemd."""
