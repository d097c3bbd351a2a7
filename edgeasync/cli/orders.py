"""`edgeasync device`: sends orders about one device to a running hub."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgeasync.cli.options import AnswerTimeout, HubAddress, Json, OperatorKeys
from edgeasync.cli.output import Printer
from edgeasync.cli.status import print_status
from edgeasync.net.address import DEFAULT_ADDRESS
from edgeasync.net.status import give_order

app = typer.Typer(rich_markup_mode=None)

Order = Literal["quarantine", "release"]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The device's name, as in 'edgeasync status'.")]


@app.command("quarantine")
def device_quarantine(
    name: Name,
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    json: Json = False,
) -> None:
    """Ignore the updates of a device, and of all devices with its key, until you release it.

    It keeps training.
    """
    _give("quarantine", name, hub, timeout_s, keys, Printer(json=json))


@app.command("release")
def device_release(
    name: Name,
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    json: Json = False,
) -> None:
    """End a device's quarantine, alarm and probation."""
    _give("release", name, hub, timeout_s, keys, Printer(json=json))


def _give(order: Order, name: str, hub: str, timeout_s: float, keys: Path | None, printer: Printer) -> None:
    print_status(give_order(hub, name, order, timeout_s, keys), hub, printer)
