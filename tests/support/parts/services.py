"""A fake systemd and units for tests of `edgeasync service`."""

from pathlib import Path

from edgeasync.ops.service.unit import Unit

PROGRAM = Path("/bin/true")
FOLDER = Path("/var/lib/edgeasync")


class Manager:
    """A systemd that notes what it is asked, and whose service does what `does` says of the environment in use."""

    def __init__(self, current, does):
        self.current, self.does, self.starts, self.asked = current, does, [], []

    def start(self, unit):
        self.starts.append(self.current().name)

    def status(self, unit):
        running = self.starts[-1] if self.starts else "env-1"
        said = self.does.get(running, "joined tcp://hub:5555: as pi-1")
        invocation = f"{running} {len(self.starts)}"
        return {"ActiveState": "active", "StatusText": said, "InvocationID": invocation}

    def reload(self):
        self.asked.append("reload")

    def make_user(self):
        self.asked.append("make_user")


AGENT, PEER = (Unit(kind, PROGRAM, FOLDER) for kind in ("agent", "peer"))


def names(environments):
    return sorted(path.name for path in environments.home.iterdir())
