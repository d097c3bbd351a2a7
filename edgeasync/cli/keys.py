"""`edgeasync keys`: who may talk to a hub."""

import time
from pathlib import Path
from typing import Literal

from edgeasync.cli.options import one_of
from edgeasync.cli.output import Printer, print_table
from edgeasync.config import expanded, whole_address
from edgeasync.durable.allow_list import NAME, Allowed, Key, read_key
from edgeasync.durable.keys import OWNER, TOKEN_S, TOKEN_S_MAX, HubKeys, fingerprint
from edgeasync.errors import ConfigError
from edgeasync.host.wall_clock import written
from edgeasync.net.address import check_connect

ROLES: tuple[Literal["device", "operator"], ...] = ("device", "operator")

DEFAULT_FOLDER = "~/.config/edgeasync/keys"


def open_folder(folder: Path | None) -> HubKeys:
    """Return the folder of keys at a path, or at the usual one."""
    return HubKeys(expanded(folder or DEFAULT_FOLDER))


def init_keys(folder: Path | None, addresses: list[str], printer: Printer) -> None:
    """Make a hub's keys."""
    addresses = _checked_addresses(addresses)
    keys = HubKeys.init(open_folder(folder).folder)
    if addresses:
        keys.remember_addresses(tuple(addresses))
    public = keys.pair().public
    printer.result(
        {"keys": str(keys.folder), "hub_key": public.hex(), "operator": OWNER},
        f"keys in {keys.folder}, the hub's public key is {public.hex()}",
        f"next: edgeasync hub ... --keys {keys.folder}, and edgeasync keys enrol NAME for each device",
    )


def enrol(
    folder: Path | None,
    name: str,
    printer: Printer,
    *,
    role: str,
    key: str | None,
    addresses: list[str],
    valid_hours: float | None,
) -> None:
    """Let a key in under a name, or print a token by which a device brings its own."""
    valid_s = TOKEN_S if valid_hours is None else 3600.0 * valid_hours
    if not 0.0 < valid_s <= TOKEN_S_MAX:
        raise ConfigError(f"--valid-hours {valid_hours:g}: give hours, {TOKEN_S_MAX / 3600:.0f} at most")
    keys, name, role = open_folder(folder), _checked_name(name), one_of("--role", role, ROLES)
    if valid_hours is not None and (key is not None or role == "operator"):
        raise ConfigError("--valid-hours is for a token, and a key that you enrol needs no token; leave it out")
    addresses = _checked_addresses(addresses)
    public = None if key is None else _checked_key(key)
    keys.pair()
    keys.check_role(name, role)
    if addresses:
        keys.remember_addresses(tuple(addresses))
    if public is not None:
        keys.allow(name, role, public)
        _print_entry(Allowed(name, role, public), printer)
        return
    if role == "operator":
        place = keys.make_operator(name)
        printer.result(
            {"name": name, "role": role, "keys": str(place)},
            f"{name} is an operator, with a new key in {place}"
            if name == OWNER
            else f"{name} is an operator; move {place} to that person's machine, for --keys there",
        )
        return
    reached = keys.addresses()
    if not reached:
        raise ConfigError("where do devices reach the hub? give --address tcp://HOST:PORT, once")
    token = keys.issue_token(name, reached, time.time(), valid_s=valid_s)
    within = f"{TOKEN_S / 60:.0f} minutes" if valid_hours is None else f"{valid_hours:g} hours"
    printer.result(
        {"name": name, "token": token.text(), "expires_s": valid_s},
        token.text(),
        f"on the device, within {within}, once: edgeasync agent --enrol TOKEN --data FILE",
    )


def list_keys(folder: Path | None, printer: Printer) -> None:
    """Print the allow-list, and the tokens that may still be used."""
    keys = open_folder(folder)
    entries, now_s = keys.allow_list().entries.values(), time.time()
    tokens = [token for token in keys.tokens() if not token.used and token.until_s > now_s]
    if printer.json:
        for entry in entries:
            _print_entry(entry, printer)
        for token in tokens:
            printer.object({"name": token.name, "role": "token", "expires_s": round(token.until_s - now_s)})
        return
    rows = [("name", "role", "fingerprint", "key")]
    rows += [(entry.name, entry.role, fingerprint(entry.key), entry.key.hex()) for entry in entries]
    rows += [(token.name, "token", f"for {token.until_s - now_s:.0f} s", "") for token in tokens]
    print_table(printer, rows)


def revoke(folder: Path | None, name: str, printer: Printer) -> None:
    """Shut the key of a name out, and its tokens."""
    keys = open_folder(folder)
    tokens = keys.revoke(_checked_name(name))
    if (entry := keys.read_allow_list().entries.get(name)) is not None:
        _print_entry(entry, printer)
        return
    done = "its token counts no more" if tokens else "its line, which could not be read, is a comment now"
    printer.result({"name": name, "role": "revoked"}, f"{name}: {done}")


def list_pending(folder: Path | None, printer: Printer, *, clear: bool) -> None:
    """Print the keys that asked to be let in, or forget them."""
    keys = open_folder(folder)
    if clear:
        count = keys.clear_pending()
        printer.result({"cleared": count}, f"{count} keys forgotten; those that you have refused stay refused")
        return
    known = keys.allow_list().by_key()
    waiting = [one for one in keys.pending() if not one.refused and one.key not in known]
    if printer.json:
        for one in waiting:
            shown = {"fingerprint": fingerprint(one.key), "address": one.address}
            printer.object(shown | {"seen": one.seen_s, "key": one.key.hex()})
        return
    rows = [("fingerprint", "address", "last seen")]
    print_table(printer, [*rows, *[(fingerprint(one.key), one.address, written(one.seen_s)) for one in waiting]])


def accept(folder: Path | None, shown: str, name: str, printer: Printer) -> None:
    """Let a key in that asked for it."""
    _print_entry(open_folder(folder).accept(shown, _checked_name(name)), printer)


def refuse(folder: Path | None, shown: str, printer: Printer) -> None:
    """Show a key no more."""
    open_folder(folder).refuse(shown)
    printer.result({"fingerprint": shown, "role": "refused"}, f"{shown}: refused")


def _print_entry(entry: Allowed, printer: Printer) -> None:
    shown = fingerprint(entry.key)
    printer.result(
        {"name": entry.name, "role": entry.role, "fingerprint": shown, "key": entry.key.hex()},
        f"{entry.name}: {entry.role}, key {shown}",
    )


def _checked_addresses(addresses: list[str]) -> list[str]:
    for address in addresses:
        check_connect(address, insecure=True, name="--address")
    return list(map(whole_address, addresses))


def _checked_name(name: str) -> str:
    if not NAME.match(name):
        raise ConfigError(
            f"{name!r} is not a name: begin with a letter or digit, then up to 63 letters, digits, '.', '_', '-'; "
            "the key of NAME speaks for NAME/0, NAME/1 and so on too"
        )
    return name


def _checked_key(key: str) -> Key:
    try:
        return read_key(key)
    except ValueError as error:
        raise ConfigError(f"--key: {error}") from error
