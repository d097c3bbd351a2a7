"""The command line: `edgeasync hub | agent | status | demo`."""
