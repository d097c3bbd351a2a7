"""The sender of a message, by its connection's key, not by the message's content."""

import re
from typing import Literal

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import Hello, Key, Message, Order, StatusRequest, Wake

_NUMBER = re.compile(r"/[0-9]{1,3}\Z")


class Sender(msgspec.Struct, frozen=True):
    """A key, its name in the hub's allow-list, and its role; `anybody` without keys."""

    key: Key = b""
    name: str = ""
    role: Literal["anybody", "device", "operator"] = "anybody"

    def speaks_for(self, device_id: str) -> bool:
        """Return whether the key may use a device id: its name, or its name with a number."""
        if self.role == "anybody":
            return True
        return self.role == "device" and _NUMBER.sub("", device_id) == self.name


ANYBODY = Sender()


class NotAllowedError(ProtocolError):
    """A key sends a message that its role does not allow."""


def check_allowed(sender: Sender, message: Message) -> None:
    """Raise `NotAllowedError` for a message that the sender's role does not allow.

    Operators may request the status, wake the fleet and send orders.
    """
    if isinstance(message, StatusRequest):
        return
    if isinstance(message, Wake | Order):
        if sender.role != "operator":
            raise NotAllowedError(f"the key of {sender.name} belongs to a device; only operators may do this")
        return
    if sender.role != "device":
        raise NotAllowedError(f"the key of {sender.name} belongs to an operator, not to a device")
    if isinstance(message, Hello) and not sender.speaks_for(message.device_id):
        raise NotAllowedError(
            f"this device's key allows the names {sender.name}, {sender.name}/0 and so on, not {message.device_id}"
        )
