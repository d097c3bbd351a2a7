"""`edgeasync keys`: manages the keys that may connect to a hub."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgeasync.cli.options import Json, one_of
from edgeasync.cli.output import Printer, print_table
from edgeasync.cli.outputs import KeyLine
from edgeasync.config import expanded, whole_address
from edgeasync.durable.allow_list import Allowed, Key, check_name, read_key
from edgeasync.durable.keys import OWNER, TOKEN_S, TOKEN_S_MAX, HubKeys
from edgeasync.durable.keys import fingerprint as fingerprint_of
from edgeasync.errors import ConfigError
from edgeasync.host.wall_clock import written
from edgeasync.net.address import check_connect

ROLES: tuple[Literal["device", "operator"], ...] = ("device", "operator")

DEFAULT_FOLDER = "~/.config/edgeasync/keys"

app = typer.Typer(rich_markup_mode=None)

Keys = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the hub's keys [default: ~/.config/edgeasync/keys]."),
]
Reached = Annotated[
    list[str] | None,
    typer.Option(
        help="Address that devices use for the hub, tcp://HOST:PORT. Saved for later calls. May be repeated."
    ),
]


def open_folder(keys: Path | None) -> HubKeys:
    """Open the folder of a hub's keys, by default ~/.config/edgeasync/keys."""
    return HubKeys(expanded(keys or DEFAULT_FOLDER))


@app.command("init")
def init_keys(keys: Keys = None, address: Reached = None, json: Json = False) -> None:
    """Create a hub's key, an allow-list, and an operator key for yourself."""
    addresses = _checked_addresses(address)
    made = HubKeys.init(open_folder(keys).folder)
    if addresses:
        made.remember_addresses(tuple(addresses))
    public = made.pair().public
    Printer(json=json).result(
        KeyLine(keys=str(made.folder), hub_key=public.hex(), operator=OWNER),
        f"created keys in {made.folder}; the hub's public key is {public.hex()}",
        f"next: run edgeasync hub ... --keys {made.folder}, and edgeasync keys enrol NAME for each device",
    )


@app.command("enrol")
def enrol(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The device's name. The new key replaces the name's previous key."),
    ],
    role: Annotated[str, typer.Option(help="Role of the key: device or operator.")] = "device",
    key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC_KEY", help="The device's public key, to admit it without a token."),
    ] = None,
    address: Reached = None,
    valid_hours: Annotated[
        float | None, typer.Option(help="Hours until the token expires, at most 168 [default: ten minutes].")
    ] = None,
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Print a single-use token that enrols one device within ten minutes.

    With --key, admit that key.
    """
    printer = Printer(json=json)
    valid_s = TOKEN_S if valid_hours is None else 3600.0 * valid_hours
    if not 0.0 < valid_s <= TOKEN_S_MAX:
        raise ConfigError(f"--valid-hours {valid_hours:g}: must be above 0 and at most {TOKEN_S_MAX / 3600:.0f}")
    folder, name, chosen = open_folder(keys), check_name(name), one_of("--role", role, ROLES)
    if valid_hours is not None and (key is not None or chosen == "operator"):
        raise ConfigError("--valid-hours applies to tokens only; remove it, or remove --key and --role operator")
    addresses = _checked_addresses(address)
    public = None if key is None else _checked_key(key)
    folder.pair()
    folder.check_role(name, chosen)
    if addresses:
        folder.remember_addresses(tuple(addresses))
    if public is not None:
        folder.allow(name, chosen, public)
        _print_entry(Allowed(name, chosen, public), printer)
        return
    if chosen == "operator":
        place = folder.make_operator(name)
        printer.result(
            KeyLine(name=name, role="operator", keys=str(place)),
            f"{name} is now an operator, with a new key in {place}"
            if name == OWNER
            else f"{name} is now an operator; move {place} to that person's machine, for --keys there",
        )
        return
    reached = folder.addresses()
    if not reached:
        raise ConfigError("tokens need the hub's address: add --address tcp://HOST:PORT; later tokens reuse it")
    token = folder.issue_token(name, reached, time.time(), valid_s=valid_s)
    within = f"{TOKEN_S / 60:.0f} minutes" if valid_hours is None else f"{valid_hours:g} hours"
    printer.result(
        KeyLine(name=name, token=token.text(), expires_s=valid_s),
        token.text(),
        f"on the device, once and within {within}, run: edgeasync agent (or peer) --enrol TOKEN --data FILE",
    )


@app.command("list")
def list_keys(keys: Keys = None, json: Json = False) -> None:
    """List admitted keys, revoked keys and valid tokens."""
    printer = Printer(json=json)
    folder = open_folder(keys)
    entries, now_s = folder.allow_list().entries.values(), time.time()
    tokens = [token for token in folder.tokens() if not token.used and token.until_s > now_s]
    if printer.json:
        for entry in entries:
            _print_entry(entry, printer)
        for token in tokens:
            printer.object(KeyLine(name=token.name, role="token", expires_s=round(token.until_s - now_s)))
        return
    rows = [("name", "role", "fingerprint", "key")]
    rows += [(entry.name, entry.role, fingerprint_of(entry.key), entry.key.hex()) for entry in entries]
    rows += [(token.name, "token", f"for {token.until_s - now_s:.0f} s", "") for token in tokens]
    print_table(printer, rows)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The device or person whose key is revoked.")],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Revoke a key. A running hub closes its connection within a second."""
    printer = Printer(json=json)
    folder = open_folder(keys)
    tokens = folder.revoke(check_name(name))
    if (entry := folder.read_allow_list().entries.get(name)) is not None:
        _print_entry(entry, printer)
        return
    done = "its token is revoked" if tokens else "its unreadable line is now a comment"
    printer.result(KeyLine(name=name, role="revoked"), f"{name}: {done}")


@app.command("pending")
def list_pending(
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete the list. Devices that ask again are listed again.")
    ] = False,
    keys: Keys = None,
    json: Json = False,
) -> None:
    """List unknown keys that asked a hub with --knocking for admission."""
    printer = Printer(json=json)
    folder = open_folder(keys)
    if clear:
        count = folder.clear_pending()
        printer.result(KeyLine(cleared=count), f"{count} pending keys deleted; refused keys stay refused")
        return
    known = folder.allow_list().by_key()
    waiting = [one for one in folder.pending() if not one.refused and one.key not in known]
    if printer.json:
        for one in waiting:
            fingerprint, key = fingerprint_of(one.key), one.key.hex()
            printer.object(KeyLine(fingerprint=fingerprint, address=one.address, seen=one.seen_s, key=key))
        return
    rows = [("fingerprint", "address", "last seen")]
    print_table(
        printer, [*rows, *[(fingerprint_of(one.key), one.address, written(one.seen_s)) for one in waiting]]
    )


@app.command("accept")
def accept(
    fingerprint: Annotated[
        str,
        typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' and the agent print it."),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The device's name. The new key replaces the name's previous key."),
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Admit a pending key."""
    _print_entry(open_folder(keys).accept(fingerprint, check_name(name)), Printer(json=json))


@app.command("refuse")
def refuse(
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' prints it.")
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Refuse a pending key. 'pending' no longer lists it."""
    open_folder(keys).refuse(fingerprint)
    Printer(json=json).result(KeyLine(fingerprint=fingerprint, role="refused"), f"{fingerprint}: refused")


def _print_entry(entry: Allowed, printer: Printer) -> None:
    shown = fingerprint_of(entry.key)
    printer.result(
        KeyLine(name=entry.name, role=entry.role, fingerprint=shown, key=entry.key.hex()),
        f"{entry.name}: {entry.role}, key {shown}",
    )


def _checked_addresses(given: list[str] | None) -> list[str]:
    addresses = given or []
    for address in addresses:
        check_connect(address, insecure=True, name="--address")
    return list(map(whole_address, addresses))


def _checked_key(key: str) -> Key:
    try:
        return read_key(key)
    except ValueError as error:
        raise ConfigError(f"--key: {error}") from error
