"""Shells of hub, agent and peer, and their settings. A shell executes the effects of its core."""
