"""The decisions of a peer, which averages its model with others without a hub: numbers and names alone."""
