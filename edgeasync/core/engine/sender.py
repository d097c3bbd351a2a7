"""Whose a message is: by the key of the connection it came on, never by what it says."""

import re
from typing import Literal

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import Hello, Key, Message, Order, StatusRequest, Wake

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


class NotAllowedError(ProtocolError):
    """A key says what is not its to say."""


def check_allowed(sender: Sender, message: Message) -> None:
    """Raise `NotAllowedError` for what a key must not say: an operator's asks, wakes and gives orders."""
    if isinstance(message, StatusRequest):
        return
    if isinstance(message, Wake | Order):
        if sender.role != "operator":
            raise NotAllowedError(f"the key of {sender.name} is a device's; operators alone may do this")
        return
    if sender.role != "device":
        raise NotAllowedError(f"the key of {sender.name} is an operator's, not a device's")
    if isinstance(message, Hello) and not sender.speaks_for(message.device_id):
        raise NotAllowedError(
            f"this device's key speaks for {sender.name}, {sender.name}/0 and so on, not for {message.device_id}"
        )
