"""Enrol a device with a token, or detect that its keys do not match those of its hub.

If the keys do not match, waiting is useless.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from edgeasync.core.device.effects import DeviceReport
from edgeasync.durable.keys import Token, fingerprint
from edgeasync.errors import AccessError
from edgeasync.net.credentials import Credentials
from edgeasync.net.curve import mechanism_at
from edgeasync.net.enrolment import USED, enrol
from edgeasync.net.hub_connection import HubConnection
from edgeasync.net.reach import explain, keys_do_not_fit
from edgeasync.net.socket_monitor import Finding


class DeviceAccess:
    """Enrols a device if it has a token, then checks whether its keys match those of the hub.

    The agent calls all methods on its event loop. `on_report` is called with the progress of an
    enrolment. `give_up` is called with an error that cannot be resolved by waiting.
    """

    def __init__(
        self,
        credentials: Credentials,
        connection: HubConnection,
        device_id: str,
        on_report: Callable[[DeviceReport], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._keys, self._token = credentials.keys, credentials.token
        self._own = None if credentials.pair is None else credentials.pair[0].public
        self._knocking = credentials.knocking
        self._connection = connection
        self._device_id = device_id
        self._on_report, self._give_up = on_report, give_up
        self._token_denied = self._let_in = False
        self._cuts: Counter[str] = Counter()
        self._shut_out: dict[str, str] = {}
        """Maps addresses to the reason why the keys do not match, until a hub has admitted this
        device.
        """
        self._looking: asyncio.Task[None] | None = None

    def begin(self, then: Callable[[], None]) -> None:
        """Enrol in the background if there is a token. Then call `then`."""
        if self._token is None:
            then()
        else:
            self._looking = asyncio.get_running_loop().create_task(self._enrol(self._token, then))

    def cancel(self) -> None:
        """Stop enrolling and checking."""
        if self._looking is not None:
            self._looking.cancel()

    async def _enrol(self, token: Token, then: Callable[[], None]) -> None:
        """Enrol the device: send its key to the hub, authenticated by the token."""
        assert self._keys is not None
        assert self._own is not None
        told: set[Finding] = set()
        may_be_in = self._keys.begin(token)
        self._look_at_addresses(token)

        async def on_failure(address: str, finding: Finding) -> None:
            nonlocal may_be_in
            may_be_in = may_be_in or finding == "spoken"
            self._connection.address = address
            if finding not in told:
                told.add(finding)
                self._on_report(DeviceReport("waiting", await explain(address, finding)))

        try:
            hub = self._connection
            name = await enrol(hub.network.context, token, self._own, hub.addresses, on_failure)
            if name is not None:
                self._keys.finish(token)
                self._on_report(DeviceReport("enrolled", f"as {name}"))
            elif not may_be_in:
                self._give_up(AccessError(USED))
                return
            # If the answer to an earlier attempt was lost, the hub may already know the key.
            self._token_denied = name is None
            then()
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def _look_at_addresses(self, token: Token) -> None:
        """Warn if the settings and the token name different hubs. The device uses the settings."""
        said, named = self._connection.addresses, token.addresses
        if not set(said) & set(named):
            detail = f"using hub {', '.join(said)} from the settings instead of {', '.join(named)} from the token"
            self._on_report(DeviceReport("warning", detail))

    def joined(self) -> None:
        """Record that a hub has admitted the device.

        If the hub had denied the token before, an earlier enrolment had already used it
        successfully. Then complete that enrolment.
        """
        self._let_in = True
        self._connection.findings.clear()
        if self._token_denied and self._token is not None and self._keys is not None:
            self._token_denied = False
            self._keys.finish(self._token)

    @property
    def knock(self) -> str:
        """Instructions for accepting the key of this device.

        They are empty unless the device is waiting for acceptance.
        """
        denied = self._connection.findings.get(self._connection.address) == "denied"
        if not denied or not self._knocking or self._let_in or self._own is None:
            return ""
        return (
            "waiting for admission; ask the hub's operator to run "
            f"'edgeasync keys accept {fingerprint(self._own)} {self._device_id.partition('/')[0]}'"
        )

    def disconnected(self) -> None:
        """After a connection was closed, check whether the keys match those of the hub."""
        address, finding = self._connection.address, self._connection.finding
        if finding is None or self._let_in:
            return
        self._cuts[address] = self._cuts[address] + 1 if finding == "foreign" else 0
        idle = self._looking is None or self._looking.done()
        if idle and finding in ("denied", "mechanism", "foreign"):
            self._looking = asyncio.get_running_loop().create_task(self._look_at_keys(address, finding))

    async def _look_at_keys(self, address: str, finding: Finding) -> None:
        """Give up if the device's keys match none of the hubs, because waiting would not help.

        If a hub has admitted the device before, the device always waits, because an attacker on the
        network path could imitate a rejection.
        """
        mechanism = "" if finding == "denied" else await mechanism_at(address)
        reason = keys_do_not_fit(
            finding, keyed=self._own is not None, mechanism=mechanism, cuts=self._cuts[address]
        )
        if not reason or self._let_in:
            return
        if finding == "denied" and self._knocking:
            return  # a person at the hub may admit it
        self._shut_out[address] = USED if self._token_denied else reason
        if len(self._shut_out) == len(self._connection.addresses):
            told = "; ".join(f"{address}: {why}" for address, why in self._shut_out.items())
            self._give_up(AccessError(told))
