"""What goes wrong among peers, drawn by seed: a value that can be printed, and cut down."""

import random as randomness
from dataclasses import dataclass
from typing import NamedTuple

from edgeasync.core.peer.events import PeersChanged
from edgeasync.protocol.peer_messages import (
    ROUND_NUMBER_MAX,
    Abandon,
    Offer,
    PeerCredit,
    PeerPiece,
    PeerPing,
    Propose,
    RoundId,
    RoundMember,
)

FAULTS_S = 7.0


class Trouble(NamedTuple):
    """Chances for each message on a link."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    corrupt: float = 0.0

    def meet(self, message, part, random):
        """Return what arrives: how much later, whether it cannot be read, and the payload."""
        if random.random() < self.lost:
            return []
        copies = []
        for _ in range(2 if random.random() < self.repeated else 1):
            delay_s = random.uniform(0.0, self.late_s) if random.random() < self.late else 0.0
            malformed, met = False, part
            if random.random() < self.corrupt:
                malformed = not part or random.random() < 0.3
                met = part if malformed else spoilt(part, random)
            copies.append((delay_s, malformed, met))
        return copies


def spoilt(part, random):
    if random.random() < 0.3:
        return part[: random.randrange(len(part))]
    position = random.randrange(len(part))
    return part[:position] + bytes([part[position] ^ (1 << random.randrange(8))]) + part[position + 1 :]


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time, to some of the peers, for a while."""

    at_s: float
    kind: str
    names: tuple
    for_s: float
    trouble: Trouble
    seed: int


KINDS = (
    "bad_link", "bad_link", "bad_network", "cut", "cut_one_way", "fail", "hang", "isolate", "kill", "kill", "kill",
    "kill_at_once", "restore", "rogue", "rot", "split", "stop", "suspend", "unlist",
)  # fmt: skip


def draw_faults(seed, names):
    """Return the faults of a seed in order of time."""
    random = randomness.Random(f"peers {seed}")
    faults = []
    for _ in range(random.randint(2, 9)):
        kind = random.choice(KINDS)
        chosen = tuple(random.sample(names, min(len(names), random.randint(1, max(1, len(names) // 2)))))
        if kind in {"bad_link", "cut", "cut_one_way"}:
            chosen = tuple(random.sample(names, 2))
        elif kind in {"kill", "fail", "hang", "rogue", "rot", "stop", "suspend", "unlist", "restore", "isolate"}:
            chosen = (random.choice(names),)
        faults.append(
            Fault(
                round(random.uniform(0.2, FAULTS_S), 3),
                kind,
                chosen,
                round(3.0 * random.random() ** 2, 3),
                draw_trouble(random),
                random.randrange(1000),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_trouble(random):
    chances = [round(random.uniform(0.02, 0.4), 2) if random.random() < 0.5 else 0.0 for _ in range(4)]
    lost, repeated, late, corrupt = chances if any(chances) else (0.1, 0.1, 0.1, 0.1)
    return Trouble(lost, repeated, late, round(1.5 * random.random() ** 2, 3), corrupt)


class Injector:
    """Carries the faults of a plan out."""

    def __init__(self, world, plan):
        self.world = world
        self.healed = False
        for fault in plan:
            world.clock.at(fault.at_s, lambda fault=fault: self.healed or self._inject(fault))

    def _inject(self, fault):  # noqa: C901, PLR0912 (a table: a line or two for each kind)
        world = self.world
        devices = [world.devices[name] for name in fault.names]
        until_s = world.clock.now_s + fault.for_s
        others = [name for name in world.names if name not in fault.names]
        match fault.kind:
            case "kill" | "kill_at_once" | "restore" | "rogue":
                for device in devices:
                    device.kill()
                    world.clock.at(until_s, lambda it=device: self._start(it, restored=fault.kind == "restore"))
                if fault.kind == "rogue":
                    Rogue(world, devices[0], until_s, fault.seed)
            case "stop":
                for device in devices:
                    device.stop()
                    world.clock.at(until_s, lambda it=device: self._start(it))
            case "hang":
                for device in devices:
                    device.hung_until_s = until_s
            case "suspend":
                for device in devices:
                    device.suspended_until_s = until_s
            case "fail":
                for device in devices:
                    device.fails = 0.2
                    world.clock.at(until_s, lambda it=device: setattr(it, "fails", 0.0))
            case "rot":
                for device in devices:
                    device.rots = 0.2
                    world.clock.at(until_s, lambda it=device: setattr(it, "rots", 0.0))
            case "unlist":
                self._unlist(fault.names, until_s)
            case "cut" | "cut_one_way":
                one, other = fault.names
                world.cut[one, other] = until_s
                if fault.kind == "cut":
                    world.cut[other, one] = until_s
            case "isolate" | "split":
                for one in fault.names:
                    for other in others:
                        world.cut[one, other] = world.cut[other, one] = until_s
            case "bad_link":
                one, other = fault.names
                world.bad[one, other] = until_s, fault.trouble
            case "bad_network":
                for one in world.names:
                    for other in world.names:
                        world.bad[one, other] = until_s, fault.trouble

    def _start(self, device, *, restored=False):
        if not self.healed:
            device.start(restored=restored)

    def _unlist(self, names, until_s):
        """Take peers off the lists of the others for a while."""
        for device in self.world.devices.values():
            if device.name not in names:
                self.list(device, tuple([name for name in self.world.names if name not in names]))
                self.world.clock.at(until_s, lambda it=device: self.list(it, tuple(self.world.names)))

    @staticmethod
    def list(device, peers):
        device.peers = peers
        device.handle(PeersChanged(peers))

    def heal(self):
        """End all faults but suspensions, whose queued events come in order, and start those that are off.

        A device that was told to stop while it was suspended stops after that, and is then started, too.
        """
        self.healed = True
        world = self.world
        world.cut.clear()
        world.bad.clear()
        for device in world.devices.values():
            device.hung_until_s = min(device.hung_until_s, world.clock.now_s)
            device.rots = device.fails = 0.0
            device.start()
            world.clock.at(device.suspended_until_s, device.start)
            if device.peers != tuple(world.names):
                self.list(device, tuple(world.names))


class Rogue:
    """Has the key of a device that is off, and says anything at all, but never a whole payload."""

    def __init__(self, world, device, until_s, seed):
        self.world, self.device, self.until_s = world, device, until_s
        self.random = randomness.Random(seed)
        self.count = 0
        self.incarnation = self.random.choice((device.incarnation, device.incarnation + 1, 2**53))
        self._speak()

    def _speak(self):
        if self.world.clock.now_s >= self.until_s or self.device.running:
            return
        name = self.random.choice(self.world.names)
        if name != self.device.name:
            message = self._message()
            part = self.random.randbytes(self.random.randint(1, 40)) if isinstance(message, PeerPiece) else None
            self.world.send(self.device, name, message, part)
        self.world.clock.after(self.random.uniform(0.005, 0.1), self._speak)

    def _round(self):
        random = self.random
        known = [
            each.core.rounds.current.id
            for each in self.world.devices.values()
            if each.running and each.core.rounds.current
        ]
        if known and random.random() < 0.6:
            return random.choice(known)
        number = random.choice((0, 1, random.randrange(100), 2**31, 2**40, ROUND_NUMBER_MAX))
        return RoundId(number, random.choice([*self.world.names, self.device.name]), self.incarnation)

    def _names(self):
        return tuple(
            self.random.sample([*self.world.names, "nobody"], self.random.randint(0, len(self.world.names)))
        )

    def _message(self):
        random = self.random
        step, size = random.randrange(12), random.choice((0, 1, 24, 48, 2**30, 2**53))
        match random.randrange(8):
            case 0 | 1 | 2:
                self.count += random.randint(0, 3)
                heard = tuple(self.world.names) if random.random() < 0.8 else self._names()
                number = random.choice((0, 5, 2**20, 2**33, ROUND_NUMBER_MAX))
                ready = random.random() < 0.8
                return PeerPing(
                    self.incarnation,
                    self.count,
                    "00ff",
                    number,
                    ready,
                    heard,
                    random.choice((None, self._round())),
                    round_every_s=self.world.settings.round_every_s,
                )
            case 3:
                members = [
                    RoundMember(name, device.incarnation + random.choice((0, 0, 0, 1)))
                    for name, device in self.world.devices.items()
                    if random.random() < 0.9
                ]
                members += [RoundMember(self.device.name, self.incarnation)] * 2
                return Propose(self._round(), "ring", random.choice(("exact", "none")), 24, tuple(members[-6:]))
            case 4:
                return Offer(self._round(), step, size, random.randrange(2**64), random.choice((0, size)))
            case 5:
                return PeerCredit(self._round(), step, size, again=random.random() < 0.5)
            case 6:
                return PeerPiece(self._round(), step, random.choice((0, 24, 48)), random.randrange(2**64))
        reason, step = random.choice(("lost", "stalled", "corrupt")), random.randint(-1, 9)
        return Abandon(self._round(), reason, step, self._names(), ready=random.random() < 0.5)
