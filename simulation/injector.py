"""Carries out a `FaultPlan` on a simulated hub and its devices, and heals everything in the end."""

from collections.abc import Callable, Mapping
from typing import Literal

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.errors import EdgeAsyncError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Order, Refuse, Status
from edgeasync.protocol.wire import Buffer
from simulation import faults
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.hub import Connections, SimulatedHub
from simulation.link_faults import LinkFaults

HUNG_STEP_S = 1e9
"""What a local step takes while a trainer hangs."""

START_AGAIN_S = 0.5
"""When a hub that could not start is started again."""


ORDER_AGAIN_S = 0.7
"""How long an operator waits for an answer until it gives the order again."""

OPERATOR = Sender(bytes(32), "admin", "operator")


class FaultInjector:
    """Lets the faults of a plan happen; call `look` after everything that the clock does.

    What happened is noted in `log`, with its time. A fault of something that is not there, like switching off what
    is off, does nothing.
    """

    def __init__(
        self,
        clock: VirtualClock,
        plan: faults.FaultPlan,
        hub: SimulatedHub,
        devices: Mapping[str, SimulatedDevice],
        disk: SimulatedDisk | None,
    ) -> None:
        self.log: list[tuple[float, faults.Fault]] = []
        self.hub_crashes = self.device_crashes = 0
        self._clock = clock
        self._hub = hub
        self._devices = devices
        self._disk = disk
        self._sync_s = hub.writing.sync_s
        self._steps_s = {name: device.training.step_s for name, device in devices.items()}
        self._under_way: list[tuple[faults.Fault, float]] = []
        self._waiting: list[faults.WhenSteps | faults.WhenVersion] = []
        self._operators = 0
        self._newest_order: dict[str, int] = {}
        self._excluded: set[str] = set()
        self._dying = faults.CrashHub()
        self._again: faults.CrashHubAtDisk | None = None
        self._healed = False
        for planned in plan.faults:
            self._arrange(planned)

    def look(self) -> None:
        """Let happen what was waiting for what has come about."""
        if self._disk is not None and self._disk.powerless:
            self._crash_hub(self._dying)
        for planned in self._waiting[:]:
            if self._has_come(planned):
                self._waiting.remove(planned)
                self._happen(planned.fault)

    def heal(self) -> None:
        """End all faults, those that have not happened yet among them, and switch everything on."""
        self._healed = True
        self._again = None
        self._waiting.clear()
        self._under_way.clear()
        if self._disk is not None:
            self._disk.heal()
        self._hub.writing.sync_s = self._sync_s
        if not self._hub.running:
            self._hub.start()
        for name, device in self._devices.items():
            self._set_link(device)
            self._set_speed(name, device)
            device.resume()
            if not device.running and device.finished is None:
                device.start()
        self._excluded.clear()
        for name in self._newest_order:  # a backup that was put back may have an order that was ended since
            self._order(name, "release")

    # -- when ------------------------------------------------------------------------------------------------

    def _arrange(self, planned: faults.Planned) -> None:
        if isinstance(planned, faults.At):
            self._later_at(planned.time_s, lambda: self._happen(planned.fault))
        else:
            self._waiting.append(planned)

    def _later_at(self, time_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self._healed:
                action()

        self._clock.at(time_s, act)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._later_at(self._clock.now_s + delay_s, action)

    def _has_come(self, planned: faults.WhenSteps | faults.WhenVersion) -> bool:
        if isinstance(planned, faults.WhenVersion):
            return self._hub.running and self._hub.core.version >= planned.version
        device = self._devices.get(planned.device)
        return device is not None and device.steps_total >= planned.steps

    # -- what ------------------------------------------------------------------------------------------------

    def _happen(self, fault: faults.Fault) -> None:
        self.log.append((self._clock.now_s, fault))
        if isinstance(fault, faults.CrashHub):
            self._crash_hub(fault)
        elif isinstance(fault, faults.DiskFault):
            self._trouble_disk(fault)
        elif isinstance(fault, faults.QuarantineDevice):
            self._quarantine(fault)
        elif (device := self._devices.get(fault.device)) is not None:
            self._trouble_device(device, fault)

    def _trouble_disk(self, fault: faults.DiskFault) -> None:
        if self._disk is None:
            return
        match fault:
            case faults.CrashHubAtDisk():
                self._die_at(self._disk, fault)
            case faults.RestoreBackup():
                self._back_up(self._disk, fault)
            case faults.FailingDisk():
                self._disk.failing_writes += fault.writes
                self._disk.failing_syncs += fault.syncs
            case _:
                self._while_it_lasts(fault, fault.for_s, self._set_disk)

    def _trouble_device(self, device: SimulatedDevice, fault: faults.DeviceFault) -> None:
        match fault:
            case faults.CutPower():
                self._cut_power(device, fault.off_s)
            case faults.HangTrainer():
                self._while_it_lasts(fault, fault.for_s, lambda: self._set_speed(fault.device, device))
            case faults.JumpClock():
                device.jump_clock(fault.by_s)
            case faults.Suspend():
                device.suspend(clock_stands=fault.clock_stands)
                self._later(fault.for_s, device.resume)
            case faults.Partition() | faults.BadLink():
                self._while_it_lasts(fault, fault.for_s, lambda: self._set_link(device))
            case faults.BreakConnection():
                if device.running:
                    device.break_connection()

    def _while_it_lasts(self, fault: faults.Fault, for_s: float, apply: Callable[[], None]) -> None:
        """Let a fault hold for a while; `apply` looks which ones of its kind are."""
        entry = (fault, self._clock.now_s + for_s)
        self._under_way.append(entry)
        apply()

        def end() -> None:
            self._under_way.remove(entry)
            apply()

        self._later(for_s, end)

    # -- the hub ---------------------------------------------------------------------------------------------

    def _crash_hub(self, crash: faults.CrashHub) -> None:
        died = self._disk is not None and self._disk.powerless
        if not self._hub.running and not died:
            return
        self._end_hub(crash.connections)
        if self._disk is not None and (crash.power_cut or died):
            self._disk.crash()
        self._again = crash.again
        if crash.off_s is not None:
            self._later(crash.off_s, self._start_hub)

    def _end_hub(self, connections: Connections) -> None:
        self.hub_crashes += 1
        self._hub.crash(connections)
        if connections == "broken":
            for device in self._devices.values():
                if device.running:
                    device.break_connection()

    def _die_at(self, disk: SimulatedDisk, crash: faults.CrashHubAtDisk) -> None:
        """Let the hub die at an operation of its disk from now on; `look` sees to the rest."""
        self._dying = faults.CrashHub(crash.power_cut, crash.off_s, crash.connections, crash.again)
        operation = disk.count(crash.of) + crash.operation
        disk.die_at(operation, lambda: None, crash.of, power=crash.power_cut)

    def _back_up(self, disk: SimulatedDisk, fault: faults.RestoreBackup) -> None:
        if disk.powerless:
            return
        backup = disk.copy()

        def restore() -> None:
            self._end_hub(fault.connections)
            if fault.empty:
                disk.replace()
            else:
                disk.restore(backup)
            self._again = fault.again
            if fault.off_s is not None:
                self._later(fault.off_s, self._start_hub)

        self._later(fault.after_s, restore)

    def _start_hub(self) -> None:
        """Start the hub, as a supervisor does: if it cannot, because of its disk, again and again."""
        if self._hub.running:
            return
        again, self._again = self._again, None
        if again is not None and self._disk is not None:
            self._die_at(self._disk, again)
        try:
            self._hub.start()
        except (OSError, EdgeAsyncError):
            self._later(START_AGAIN_S, self._start_hub)

    def _set_disk(self) -> None:
        disk = self._disk
        assert disk is not None
        under_way = [fault for fault, _ in self._under_way]
        disk.read_only = any(isinstance(fault, faults.ReadOnlyDisk) for fault in under_way)
        free = [fault.free_bytes for fault in under_way if isinstance(fault, faults.FullDisk)]
        disk.capacity_bytes = disk.used_bytes + min(free) if free else None
        slow = [fault.sync_s for fault in under_way if isinstance(fault, faults.SlowDisk)]
        self._hub.writing.sync_s = max([self._sync_s, *slow])

    # -- the operator ----------------------------------------------------------------------------------------

    def _quarantine(self, fault: faults.QuarantineDevice) -> None:
        """Exclude a device unless it is excluded already, and release it later."""
        if fault.device in self._excluded:
            return
        self._excluded.add(fault.device)
        self._order(fault.device, "quarantine")

        def release() -> None:
            self._excluded.remove(fault.device)
            self._order(fault.device, "release")

        self._later(fault.for_s, release)

    def _order(self, device: str, order: Literal["quarantine", "release"]) -> None:
        """Give an order, over a new connection each time, until it is answered or another takes its place."""
        self._operators += 1
        number = self._operators
        self._newest_order[device] = number
        answered = False

        def hear(header: bytes, payload: Buffer | None) -> None:  # noqa: ARG001
            nonlocal answered
            message = wire.decode(header)
            answered = answered or isinstance(message, Status)
            answered = answered or (isinstance(message, Refuse) and message.code == "unknown_device")

        def give(times: int) -> None:
            if answered or self._newest_order[device] != number:
                return
            peer = f"operator#{number}.{times}".encode()
            if self._hub.running:
                self._hub.connect(peer, hear, OPERATOR)
                self._hub.receive(peer, wire.encode(Order(device, order)), None)
            self._clock.at(self._clock.now_s + ORDER_AGAIN_S, lambda: again(peer, times + 1))

        def again(peer: Peer, times: int) -> None:
            self._hub.disconnect(peer)
            give(times)

        give(1)

    # -- devices ---------------------------------------------------------------------------------------------

    def _cut_power(self, device: SimulatedDevice, off_s: float | None) -> None:
        if not device.running:
            return
        self.device_crashes += 1
        device.cut_power()

        def start() -> None:
            if not device.running and device.finished is None:
                device.start()

        if off_s is not None:
            self._later(off_s, start)

    def _set_speed(self, name: str, device: SimulatedDevice) -> None:
        hangs = any(isinstance(fault, faults.HangTrainer) and fault.device == name for fault, _ in self._under_way)
        device.training.change_speed(HUNG_STEP_S if hangs else self._steps_s[name])

    def _set_link(self, device: SimulatedDevice) -> None:
        up: LinkFaults | None = None
        down: LinkFaults | None = None
        for fault, until_s in self._under_way:
            if isinstance(fault, faults.Partition | faults.BadLink) and fault.device == device.device_id:
                trouble = faults.trouble_of(fault, until_s)
                if fault.way != "down":
                    up = trouble if up is None else up.beside(trouble)
                if fault.way != "up":
                    down = trouble if down is None else down.beside(trouble)
        device.up.trouble, device.down.trouble = up, down
