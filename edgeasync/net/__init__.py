"""All of ZeroMQ: sockets, keys on connections, bounds, and who may connect."""
