"""The two state machines, their arrays, and the engines that connect them to frames. No I/O and no clock."""
