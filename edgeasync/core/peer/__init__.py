"""The core of a peer, which averages its model with others without a hub."""
