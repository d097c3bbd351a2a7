"""The keys in a device's state folder: its own key pair, and the public key of its hub."""

from pathlib import Path

import msgspec

from edgeasync.durable.allow_list import Key, read_key
from edgeasync.durable.json_file import check_json
from edgeasync.durable.keys import KeyPair, Token
from edgeasync.durable.secret_files import private_folder, read_secret, write_secret
from edgeasync.errors import StorageError


class HubRecord(msgspec.Struct, frozen=True):
    """The hub at which a device is enrolled.

    It contains the hub's public key in hexadecimal, the hub's addresses, and the name that the hub
    assigned to the device. `token` is the public half of the token with which the device enrolled,
    if it used one.
    """

    key: str
    addresses: tuple[str, ...]
    name: str
    token: str = ""


class DeviceKeys:
    """The folder `keys` in a device's state folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "keys"
        self._secret = self._folder / "device.key"
        self._record = self._folder / "hub.json"
        self._enrolling = self._folder / "enrolling.json"

    @property
    def made(self) -> bool:
        """Whether the device has its own key and the public key of its hub."""
        return self._secret.exists() and self._record.exists()

    def own(self) -> KeyPair:
        """Return the device's own key pair; create it in the first call. Raises `StorageError`."""
        private_folder(self._folder)
        if not self._secret.exists():
            write_secret(self._secret, f"{KeyPair.make().secret.hex()}\n".encode())
        try:
            return KeyPair.of(read_key(read_secret(self._secret).decode().strip()))
        except ValueError:
            raise StorageError(
                f"{self._secret}: does not contain a key; delete it and enrol this device again"
            ) from None

    def hub(self) -> HubRecord:
        """Return the hub of this device; raises `StorageError`."""
        content = read_secret(self._record, absent="enrol this device")
        remedy = "delete it and enrol this device again"
        record = check_json(content, HubRecord, where=str(self._record), remedy=remedy)
        try:
            read_key(record.key)
        except ValueError as error:
            raise StorageError(f"{self._record}: damaged ({error}); {remedy}") from error
        return record

    def begin(self, token: Token) -> bool:
        """Record that enrolment with `token` has begun; return whether an earlier call recorded it.

        Call `finish` once the hub has added the device's key to its list. Raises `StorageError`.
        """
        private_folder(self._folder)
        note = msgspec.json.encode(_record(token))
        if self._enrolling.exists() and read_secret(self._enrolling) == note:
            return True
        write_secret(self._enrolling, note, replace=True)
        return False

    def finish(self, token: Token) -> None:
        """Store the token's hub as this device's hub; raises `StorageError`."""
        self._know(_record(token))
        self._enrolling.unlink(missing_ok=True)

    def knows_hub(self, token: Token | None) -> bool:
        """Return whether the device is enrolled at a hub or, if `token` is passed, with this token.

        Raises `StorageError`.
        """
        return self.made and (token is None or self.hub().token == _record(token).token)

    def know(self, hub: Key, addresses: tuple[str, ...], name: str) -> None:
        """Store the hub's public key and addresses and the device's name; raises `StorageError`."""
        private_folder(self._folder)
        record = HubRecord(hub.hex(), addresses, name)
        if not self._record.exists() or self.hub() != record:
            self._know(record)

    def _know(self, record: HubRecord) -> None:
        write_secret(self._record, msgspec.json.encode(record), replace=True)


class UnkeptDeviceKeys(DeviceKeys):
    """The keys of a device that enrols again at every start. They are kept in memory only."""

    def __init__(self) -> None:
        self._pair = KeyPair.make()
        self._belongs: HubRecord | None = None
        self._begun = False

    @property
    def made(self) -> bool:
        """Whether the device is enrolled at a hub."""
        return self._belongs is not None

    def own(self) -> KeyPair:
        """Return the device's key pair."""
        return self._pair

    def hub(self) -> HubRecord:
        """Return the hub of this device; raises `StorageError` before `finish`."""
        if self._belongs is None:
            raise StorageError("this device is not enrolled at a hub yet; enrol it first")
        return self._belongs

    def begin(self, token: Token) -> bool:  # noqa: ARG002
        """Record that enrolment with `token` has begun; return whether an earlier call recorded it."""
        before, self._begun = self._begun, True
        return before

    def finish(self, token: Token) -> None:
        """Use the token's hub as this device's hub."""
        self._belongs = _record(token)


def _record(token: Token) -> HubRecord:
    return HubRecord(token.hub.hex(), token.addresses, token.name, KeyPair.of(token.secret).public.hex())
