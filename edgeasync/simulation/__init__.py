"""Hub and devices under a virtual clock: their own cores and real encoded frames, no sockets, no waiting."""
