"""The command line, `edgeasync COMMAND`: one module per command, and shared helpers."""
