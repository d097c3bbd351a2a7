"""A device's keys, in its state folder: its own, and which hub it belongs to."""

from pathlib import Path

import msgspec

from edgeasync.durable.allow_list import Key, read_key
from edgeasync.durable.json_file import check_json
from edgeasync.durable.keys import KeyPair, Token
from edgeasync.durable.secret_files import private_folder, read_secret, write_secret
from edgeasync.errors import StorageError


class HubRecord(msgspec.Struct, frozen=True):
    """The hub that a device belongs to: its key in hexadecimal, its addresses, and what it calls the device.

    `token` is the public half of the token that enrolled the device, if one did.
    """

    key: str
    addresses: tuple[str, ...]
    name: str
    token: str = ""


class DeviceKeys:
    """The folder `keys` of a device's state folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "keys"
        self._secret = self._folder / "device.key"
        self._record = self._folder / "hub.json"
        self._enrolling = self._folder / "enrolling.json"

    @property
    def made(self) -> bool:
        """Whether the device has a key and knows its hub's."""
        return self._secret.exists() and self._record.exists()

    def own(self) -> KeyPair:
        """Return the device's own key pair, made the first time; raises `StorageError`."""
        private_folder(self._folder)
        if not self._secret.exists():
            write_secret(self._secret, f"{KeyPair.make().secret.hex()}\n".encode())
        try:
            return KeyPair.of(read_key(read_secret(self._secret).decode().strip()))
        except ValueError:
            raise StorageError(f"{self._secret}: holds no key; delete it and enrol this device again") from None

    def hub(self) -> HubRecord:
        """Return the hub that the device belongs to; raises `StorageError`."""
        content = read_secret(self._record, absent="enrol this device")
        remedy = "delete it and enrol this device again"
        record = check_json(content, HubRecord, where=str(self._record), remedy=remedy)
        try:
            read_key(record.key)
        except ValueError as error:
            raise StorageError(f"{self._record}: damaged ({error}); {remedy}") from error
        return record

    def begin(self, token: Token) -> bool:
        """Note that the key is about to be brought by a token; return whether it may have been before.

        Once it is known to be in the hub's list, `finish` makes that the device's hub. Raises `StorageError`.
        """
        private_folder(self._folder)
        note = msgspec.json.encode(_record(token))
        if self._enrolling.exists() and read_secret(self._enrolling) == note:
            return True
        write_secret(self._enrolling, note, replace=True)
        return False

    def finish(self, token: Token) -> None:
        """Belong to a token's hub from now on; raises `StorageError`."""
        self._know(_record(token))
        self._enrolling.unlink(missing_ok=True)

    def knows_hub(self, token: Token | None) -> bool:
        """Whether the device belongs to a hub, by this very token if there is one; raises `StorageError`."""
        return self.made and (token is None or self.hub().token == _record(token).token)

    def know(self, hub: Key, addresses: tuple[str, ...], name: str) -> None:
        """Write down which hub the device belongs to; raises `StorageError`."""
        private_folder(self._folder)
        record = HubRecord(hub.hex(), addresses, name)
        if not self._record.exists() or self.hub() != record:
            self._know(record)

    def _know(self, record: HubRecord) -> None:
        write_secret(self._record, msgspec.json.encode(record), replace=True)


class UnkeptDeviceKeys(DeviceKeys):
    """The keys of a device that is a new one at every start: they never touch a disk."""

    def __init__(self) -> None:
        self._pair = KeyPair.make()
        self._belongs: HubRecord | None = None
        self._begun = False

    @property
    def made(self) -> bool:
        """Whether the device knows its hub."""
        return self._belongs is not None

    def own(self) -> KeyPair:
        """Return the device's key pair."""
        return self._pair

    def hub(self) -> HubRecord:
        """Return the hub that the device belongs to; raises `StorageError` before `finish`."""
        if self._belongs is None:
            raise StorageError("this device belongs to no hub yet; enrol it")
        return self._belongs

    def begin(self, token: Token) -> bool:  # noqa: ARG002
        """Return whether the key may have been brought before."""
        before, self._begun = self._begun, True
        return before

    def finish(self, token: Token) -> None:
        """Belong to a token's hub from now on."""
        self._belongs = _record(token)


def _record(token: Token) -> HubRecord:
    return HubRecord(token.hub.hex(), token.addresses, token.name, KeyPair.of(token.secret).public.hex())
