"""The network layer on ZeroMQ: sockets, encryption, connection limits and authorization."""
