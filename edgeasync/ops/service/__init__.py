"""systemd services for agents, hubs and peers: units, installation and environments."""
