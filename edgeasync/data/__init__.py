"""A device's local data: examples in memory, where they come from, and how to part them among devices."""
