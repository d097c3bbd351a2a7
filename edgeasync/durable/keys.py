"""Keys, tokens and the hub's folder of keys.

A key is 32 bytes of Curve25519, written as 64 hexadecimal digits. The *fingerprint* of a key is
short enough to compare by eye, and long enough that nobody can find another key with the same
fingerprint.
"""

import base64
import hashlib
import ipaddress
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from edgeasync.durable.allow_list import Allowed, AllowList, Key, Role, is_weak, read_key
from edgeasync.durable.secret_files import (
    check_private,
    locked,
    private_folder,
    read_secret,
    staged_secret,
    write_secret,
)
from edgeasync.errors import ConfigError, StorageError
from edgeasync.structs import resolve_type

TOKEN_S = 600.0
"""Default validity of a token in seconds."""

TOKEN_S_MAX = 604_800.0
"""Maximum validity of a token: a week, for SD cards that are written now and used later."""

TOKENS_KEPT_S = 86_400.0
"""How long the hub remembers a used or expired token, to report the reason for a refusal."""

TOKEN_PREFIX = "edgeasync1_"  # noqa: S105 - not a password

PENDING_MAX = 64
"""Maximum number of keys that are waiting to be accepted.

If there are more, the oldest key from the address with the most keys is removed.
"""

PENDING_S = 86_400.0
"""How long a key keeps waiting after its last connection attempt."""

ALLOW_LIST_FILE = "allowed"
TOKENS_FILE = "tokens"
OWNER = "owner"
"""Name of the operator whose key `keys init` creates."""

_HUB_KEY = "hub.key"
_HUB_PUBLIC = "hub.pub"
_OPERATOR_KEY = "operator.key"
_ADDRESS = "address"

Line = TypeVar("Line")

_TIME_S_MAX = 1e11
"""Maximum valid time, about the year 5000, in seconds since 1970."""

_HEADER = """\
# Who may connect to this hub, one line each: NAME ROLE KEY. Roles: device, operator, revoked.
# The hub reads this file again when it changes. While a line is invalid, it admits no new keys.
"""


class KeyPair(msgspec.Struct, frozen=True):
    """A Curve25519 key pair."""

    public: Key
    secret: bytes

    @classmethod
    def make(cls) -> "KeyPair":
        """Create a random key pair."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def of(cls, secret: bytes) -> "KeyPair":
        """Return the key pair of a private key."""
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)

    def __repr__(self) -> str:
        """Show only the public key."""
        return f"KeyPair({self.public.hex()})"


class Token(msgspec.Struct, frozen=True, array_like=True):
    """An enrolment token.

    It consists of a temporary private key, the hub's key and addresses, and the name of the device.
    """

    secret: bytes
    hub: Key
    name: str
    addresses: tuple[str, ...]

    def text(self) -> str:
        """Return the token as text that needs no quoting in a shell or URL."""
        content = msgspec.msgpack.encode(self)
        return TOKEN_PREFIX + base64.urlsafe_b64encode(_digest(content) + content).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> "Token":
        """Parse a token; raises `ConfigError`, whose message never contains the token."""
        wrong = ConfigError(
            "enrol (--enrol) is not a complete token; copy the whole line that 'edgeasync keys enrol NAME' printed"
        )
        body = text.strip().removeprefix(TOKEN_PREFIX)
        if not text.strip().startswith(TOKEN_PREFIX):
            raise wrong
        try:
            content = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            token = msgspec.msgpack.decode(content[4:], type=resolve_type(cls))
        except (ValueError, msgspec.DecodeError):
            raise wrong from None
        if content[:4] != _digest(content[4:]) or len(token.secret) != 32 or len(token.hub) != 32:
            raise wrong
        if is_weak(token.hub):
            raise wrong
        return token

    def __repr__(self) -> str:
        """Show only the name of the device."""
        return f"Token({self.name})"


class IssuedToken(msgspec.Struct, frozen=True):
    """The hub's record of a token that it issued, without the private key."""

    key: Key
    name: str
    until_s: float
    used: bool = False


class Pending(msgspec.Struct, frozen=True):
    """An unknown key that has tried to connect.

    The record contains the address and time of its last attempt, and whether a user has refused the
    key.
    """

    key: Key
    address: str
    seen_s: float
    refused: bool = False


class HubKeys:
    """A hub's folder of keys.

    It contains the hub's own key pair, the allow-list, the tokens, and the operator key of the
    owner.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allow_list_file = folder / ALLOW_LIST_FILE
        self.tokens_file = folder / TOKENS_FILE
        self.pending_file = folder / "pending"

    @classmethod
    def init(cls, folder: Path) -> "HubKeys":
        """Create the hub's key, the owner's operator key and an allow-list.

        Raises `StorageError` if the folder already contains a hub's key.
        """
        keys = cls(private_folder(folder))
        if (folder / _HUB_KEY).exists():
            raise StorageError(
                f"{folder}: already contains a hub's keys, which were not changed; choose another folder"
            )
        hub, owner = KeyPair.make(), KeyPair.make()
        with locked(folder):
            allowed = AllowList(_HEADER).with_entry(Allowed(OWNER, "operator", owner.public))
            write_secret(keys.allow_list_file, allowed.text.encode(), replace=True)
            write_secret(folder / _OPERATOR_KEY, _line(owner.secret), replace=True)
            write_secret(folder / _HUB_PUBLIC, _line(hub.public), replace=True)
            write_secret(folder / _HUB_KEY, _line(hub.secret))
        return keys

    def pair(self) -> KeyPair:
        """Return the hub's own key pair; raises `StorageError`."""
        check_private(self.folder)
        if not (self.folder / _HUB_KEY).exists():
            raise StorageError(
                f"{self.folder}: does not contain a hub's key; create one with 'edgeasync keys init'"
            )
        return KeyPair.of(_read_key_file(self.folder / _HUB_KEY))

    def allow_list(self) -> AllowList:
        """Return the allow-list; raises `StorageError`, which lists all invalid lines."""
        allowed = self.read_allow_list()
        if allowed.unreadable:
            raise StorageError(
                f"{self.allow_list_file}: {allowed.trouble}; correct it: until then, the hub admits no new keys"
            )
        return allowed

    def read_allow_list(self) -> AllowList:
        """Return the allow-list even if it has invalid lines; raises `StorageError`."""
        return AllowList.read(self.allow_list_file)

    # -- changes ---------------------------------------------------------------------------------------------

    def check_role(self, name: str, role: Role) -> None:
        """Raise `StorageError` if a name already has another role.

        This prevents a mistyped name from replacing the key of another entry.
        """
        _check_role(self.allow_list(), name, role)

    def allow(self, name: str, role: Literal["device", "operator"], key: Key) -> None:
        """Add a key to the allow-list under a name; raises `StorageError`.

        The key replaces an existing key of that name if the role is the same.
        """
        with locked(self.folder):
            allowed = self.allow_list()
            _check_role(allowed, name, role)
            self._write(allowed.with_entry(Allowed(name, role, key)))

    def revoke(self, name: str) -> int:
        """Revoke the key and the tokens of a name, even if another line of the list is invalid.

        Return the number of revoked tokens. Raises `StorageError` if the name has neither a key nor
        a token, or if the files cannot be read or written.
        """
        unknown = None
        with locked(self.folder):
            try:
                revoked = self.read_allow_list().revoking(name)
            except StorageError as error:
                unknown = error
            else:
                self._write(revoked)
            tokens = self.tokens()
            kept = [token for token in tokens if token.used or token.name != name]
            if len(kept) < len(tokens):
                self._write_tokens(kept)
            elif unknown is not None:
                raise unknown
        return len(tokens) - len(kept)

    def issue_token(
        self, name: str, addresses: tuple[str, ...], now_s: float, *, valid_s: float = TOKEN_S
    ) -> Token:
        """Create a token that lets one device enrol under a name; raises `StorageError`."""
        _check_role(self.allow_list(), name, "device")
        temporary = KeyPair.make()
        issued = IssuedToken(temporary.public, name, now_s + valid_s)
        hub = self.pair().public
        with locked(self.folder):
            kept = [token for token in _spent(self.tokens(), now_s) if token.until_s > now_s - TOKENS_KEPT_S]
            self._write_tokens([*kept, issued])
        return Token(temporary.secret, hub, name, addresses)

    def tokens(self) -> list[IssuedToken]:
        """Return the tokens that are valid or were valid during the last day.

        Raises `StorageError`.
        """
        return _read_lines(self.tokens_file, _read_token, "delete it and create new tokens")

    def use_token(self, token: Key, key: Key, now_s: float) -> str | None:
        """Use a token to add a device's own key to the allow-list; return the name of the device.

        Return `None` if the token is used, expired or unknown, if the key is weak or belongs to
        another name, or if the name now belongs to an operator. Raises `StorageError`.
        """
        self.spend_expired(now_s)
        with locked(self.folder):
            tokens, allowed = self.tokens(), self.allow_list()
            found = next((each for each in tokens if each.key == token), None)
            if found is None or found.used or is_weak(key):
                return None
            owner = allowed.by_key().get(key)
            if owner is not None and owner.name != found.name:
                return None
            if _other_role(allowed, found.name, "device") is not None:
                return None
            if key in {each.key for each in tokens} | {self.pair().public}:
                return None
            # Mark the token as used first, so that nobody can use it again after a crash in between.
            used = msgspec.structs.replace(found, used=True)
            self._write_tokens([used if each is found else each for each in tokens])
            self._write(allowed.with_entry(Allowed(found.name, "device", key)))
        return found.name

    def spend_expired(self, now_s: float) -> None:
        """Mark expired tokens as used, so that they stay invalid even if the clock is set back.

        Raises `StorageError`.
        """
        with locked(self.folder):
            tokens = self.tokens()
            if (spent := _spent(tokens, now_s)) != tokens:
                self._write_tokens(spent)

    # -- pending keys ----------------------------------------------------------------------------------------

    def pending(self) -> list[Pending]:
        """Return the unknown keys that have tried to connect, including refused keys.

        Raises `StorageError`.
        """
        return _read_lines(self.pending_file, _read_pending, "delete it")

    def knock(self, key: Key, address: str, now_s: float) -> None:
        """Record that an unknown key has tried to connect; raises `StorageError`.

        If too many keys are waiting, the oldest key from the address with the most keys is removed.
        """
        if is_weak(key):
            return
        with locked(self.folder):
            kept = [one for one in self.pending() if one.seen_s > now_s - PENDING_S]
            refused = any(one.key == key and one.refused for one in kept)
            kept = [*[one for one in kept if one.key != key], Pending(key, address, now_s, refused)]
            while len(waiting := [one for one in kept if not one.refused]) > PENDING_MAX:
                of_network = Counter(network_of(one.address) for one in waiting)
                evicted = max(waiting, key=lambda one: (of_network[network_of(one.address)], -one.seen_s))
                kept.remove(evicted)
            self._write_pending(kept)

    def clear_pending(self) -> int:
        """Remove the keys that are waiting to be accepted; return their number.

        Refused keys are not removed. Raises `StorageError`.
        """
        with locked(self.folder):
            pending = self.pending()
            refused = [one for one in pending if one.refused]
            self._write_pending(refused)
        return len(pending) - len(refused)

    def accept(self, shown: str, name: str) -> Allowed:
        """Add the key with this fingerprint to the allow-list under a name; raises `StorageError`."""
        key = self._knocked(shown).key
        self.allow(name, "device", key)
        with locked(self.folder):
            self._write_pending([one for one in self.pending() if one.key != key])
        return Allowed(name, "device", key)

    def refuse(self, shown: str) -> None:
        """Refuse the key with this fingerprint, and stop listing it; raises `StorageError`."""
        with locked(self.folder):
            refused = self._knocked(shown)
            others = [one for one in self.pending() if one.key != refused.key]
            self._write_pending([*others, msgspec.structs.replace(refused, refused=True)])

    def _knocked(self, shown: str) -> Pending:
        found = next((one for one in self.pending() if fingerprint(one.key) == shown.strip().lower()), None)
        if found is None:
            raise StorageError(
                f"{shown}: no pending key has this fingerprint; list them with 'edgeasync keys pending'"
            )
        return found

    def _write_pending(self, pending: list[Pending]) -> None:
        write_secret(self.pending_file, "".join(map(_pending_line, pending)).encode(), replace=True)

    def make_operator(self, name: str) -> Path:
        """Create the keys of an operator; return their folder, which must be moved to that person.

        Raises `StorageError`.
        """
        pair, hub = KeyPair.make(), self.pair().public
        self.check_role(name, "operator")  # before any folder is created
        folder = self.folder
        if name != OWNER:
            folder = private_folder(private_folder(folder / "operators") / name)
        write_secret(folder / _HUB_PUBLIC, _line(hub), replace=True)
        with staged_secret(folder / _OPERATOR_KEY, _line(pair.secret), replace=True):
            self.allow(name, "operator", pair.public)  # if anything fails before, the old key stays valid
        return folder

    # -- the addresses in tokens -----------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the hub for devices, as stored by `remember_addresses`."""
        file = self.folder / _ADDRESS
        return tuple(read_secret(file).decode(errors="replace").split()) if file.exists() else ()

    def remember_addresses(self, addresses: tuple[str, ...]) -> None:
        """Store the addresses of the hub for future tokens; raises `StorageError`."""
        content = "".join(f"{address}\n" for address in addresses)
        write_secret(self.folder / _ADDRESS, content.encode(), replace=True)

    def _write(self, allowed: AllowList) -> None:
        content = allowed.text.encode(errors="surrogateescape")
        write_secret(self.allow_list_file, content, replace=True)

    def _write_tokens(self, tokens: list[IssuedToken]) -> None:
        write_secret(self.tokens_file, "".join(map(_token_line, tokens)).encode(), replace=True)


def operator_keys(folder: Path) -> tuple[KeyPair, Key]:
    """Read an operator's key pair and the hub's public key from a folder; raises `StorageError`."""
    check_private(folder)
    return KeyPair.of(_read_key_file(folder / _OPERATOR_KEY)), _read_key_file(folder / _HUB_PUBLIC)


def fingerprint(key: Key) -> str:
    """Return a key's fingerprint: 20 hexadecimal digits of its hash, in groups of four."""
    digits = hashlib.sha256(key).hexdigest()[:20]
    return "-".join(digits[place : place + 4] for place in range(0, 20, 4))


def _other_role(allowed: AllowList, name: str, role: Role) -> Role | None:
    """Return the role of a name's entry, or `None` if the entry is revoked or has the role `role`."""
    entry = allowed.entries.get(name)
    return None if entry is None or entry.role in (role, "revoked") else entry.role


def _check_role(allowed: AllowList, name: str, role: Role) -> None:
    """Raise `StorageError` if a name already has another role.

    This prevents a mistyped name from replacing the key of another entry.
    """
    if (other := _other_role(allowed, name, role)) is not None:
        article = "an" if other == "operator" else "a"
        raise StorageError(f"{name} is {article} {other}; revoke it first, or choose another name")


def _spent(tokens: list[IssuedToken], now_s: float) -> list[IssuedToken]:
    """Return the tokens, with expired ones marked as used."""
    return [msgspec.structs.replace(one, used=one.used or one.until_s < now_s) for one in tokens]


def network_of(address: str) -> str:
    """Return the network of an address.

    For an IPv6 address, this is its /64, because one machine may own all addresses of a /64.
    """
    try:
        number = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(number.ipv4_mapped or int(number) >> 64)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:4]


def _line(key: bytes) -> bytes:
    return f"{key.hex()}\n".encode()


def _read_key_file(path: Path) -> bytes:
    try:
        return read_key(read_secret(path).decode().strip())
    except ValueError:
        raise StorageError(f"{path}: does not contain a key; restore a copy, or create new keys") from None


def _read_lines(path: Path, read: Callable[[str], Line], remedy: str) -> list[Line]:
    """Parse the lines of a file if the file exists; raises `StorageError`."""
    if not path.exists():
        return []
    try:
        return [read(line) for line in read_secret(path).decode().splitlines()]
    except ValueError as error:
        raise StorageError(f"{path}: damaged; {remedy}") from error


def _read_time(text: str) -> float:
    """Parse seconds since 1970; raises `ValueError` if they are invalid or out of range."""
    if not 0.0 <= (time_s := float(text)) <= _TIME_S_MAX:
        raise ValueError(f"{text} is not a valid time")
    return time_s


def _token_line(token: IssuedToken) -> str:
    return f"{token.key.hex()} {token.name} {token.until_s:.0f} {'used' if token.used else 'new'}\n"


def _read_token(line: str) -> IssuedToken:
    key, name, until_s, state = line.split()
    return IssuedToken(read_key(key), name, _read_time(until_s), used=state == "used")


def _pending_line(one: Pending) -> str:
    return f"{one.key.hex()} {one.address or '-'} {one.seen_s:.0f} {'refused' if one.refused else 'new'}\n"


def _read_pending(line: str) -> Pending:
    key, address, seen_s, state = line.split()
    return Pending(read_key(key), address, _read_time(seen_s), refused=state == "refused")
