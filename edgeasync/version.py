"""The package's version, a constant because `importlib.metadata` needs 1.4 MB of memory."""

VERSION = "0.1.0"
