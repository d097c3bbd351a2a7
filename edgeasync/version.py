"""The version of this package. Using `importlib.metadata` would cost a device 1.4 MB of memory."""

VERSION = "0.1.0"
