"""The shells of hub, agent and peer, which carry out what the cores decide, and their settings."""
