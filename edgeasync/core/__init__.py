"""The two state machines, what they compute with, and what connects them to frames. No I/O and no clock."""
