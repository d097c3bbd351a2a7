"""`python -m edgeasync` is the `edgeasync` command."""

from edgeasync.cli.main import main

if __name__ == "__main__":
    main()
