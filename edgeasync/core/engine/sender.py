"""The sender of a message, identified by the key of its connection, not by the message."""

import re
from typing import Literal

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import Hello, Key, Message, Order, StatusRequest, Wake

_NUMBER = re.compile(r"/[0-9]{1,3}\Z")


class Sender(msgspec.Struct, frozen=True):
    """A key, its name in the hub's allow-list, and its role.

    Without keys, every sender has the role `anybody`.
    """

    key: Key = b""
    name: str = ""
    role: Literal["anybody", "device", "operator"] = "anybody"

    def speaks_for(self, device_id: str) -> bool:
        """Return whether the key may use a device id.

        The device id must be the key's name, or that name followed by a number.
        """
        if self.role == "anybody":
            return True
        return self.role == "device" and name_of_key(device_id) == self.name


def name_of_key(device_id: str) -> str:
    """Return the name of the key that may use a device id."""
    return _NUMBER.sub("", device_id)


ANYBODY = Sender()


class NotAllowedError(ProtocolError):
    """A sender's role does not allow the message that it sent."""


def check_allowed(sender: Sender, message: Message) -> None:
    """Raise `NotAllowedError` if the sender's role does not allow the message.

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
