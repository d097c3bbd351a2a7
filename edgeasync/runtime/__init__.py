"""The shells that carry out what the cores decide: asyncio, ZeroMQ, threads and files."""
