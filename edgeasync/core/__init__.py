"""The two state machines, their arrays and their engines. No I/O and no clock."""
