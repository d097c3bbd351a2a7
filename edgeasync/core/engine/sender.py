"""Whose a message is: by the key of the connection it came on, never by what it says."""

import re
from typing import Literal

import msgspec

from edgeasync.protocol.messages import Key

_NUMBER = re.compile(r"/[0-9]{1,3}\Z")


class Sender(msgspec.Struct, frozen=True):
    """A key, its name in the hub's allow-list, and what it may do; `anybody` where there are no keys."""

    key: Key = b""
    name: str = ""
    role: Literal["anybody", "device", "operator"] = "anybody"

    def speaks_for(self, device_id: str) -> bool:
        """Whether the key may say that it is this device: its name, or one of its name's numbers."""
        if self.role == "anybody":
            return True
        return self.role == "device" and _NUMBER.sub("", device_id) == self.name


ANYBODY = Sender()
