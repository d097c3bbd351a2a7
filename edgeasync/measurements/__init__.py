"""Measurements of each device and of the fleet, the inputs of policies."""
