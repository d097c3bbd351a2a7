"""Upgrades of a service, and rollback of a failed one."""

import pytest

from edgeasync.errors import ConfigError, HubUnreachableError, StorageError
from edgeasync.ops.service.upgrade import upgrade
from tests.support.parts.services import AGENT, PEER, Manager, names


def make_next(environments):
    folder = environments.home / "env-3"
    (folder / "bin").mkdir(parents=True)
    return folder


def at_once(condition, limit_s):
    return condition()


def up(environments, manager, unit=AGENT, *, make=None, wait=at_once, others=()):
    make = make or (lambda: make_next(environments))
    return upgrade(environments, make, unit, manager, others=others, limit_s=1.0, wait=wait)


def test_an_upgrade_keeps_the_old_environment_alone(environments):
    manager = Manager(lambda: environments.current, {})
    old = up(environments, manager)
    assert old.name == "env-2"
    assert environments.current.name == "env-3"
    assert names(environments) == ["current", "env-2", "env-3"]
    assert manager.starts == ["env-3"]


def test_what_else_runs_from_the_environment_is_started_from_the_new_one(environments):
    """Else the next upgrade would delete the environment from which it runs."""
    states = {"edgeasync-hub.service": "active", "second.service": "activating", "third.service": "failed"}

    started = []

    class Several(Manager):
        def start(self, unit):
            super().start(unit)
            started.append((unit, self.current().name))

        def status(self, unit):
            return super().status(unit) | {"ActiveState": states.get(unit, "active")}

    manager = Several(lambda: environments.current, {})
    up(environments, manager, others=list(states))
    assert started == [
        (AGENT.file, "env-3"), ("edgeasync-hub.service", "env-3"), ("second.service", "env-3"),
    ]  # fmt: skip


def test_an_upgrade_that_is_taken_back_leaves_the_others_alone(environments):
    manager = Manager(lambda: environments.current, {"env-3": ""})
    with pytest.raises(HubUnreachableError):
        up(environments, manager, others=["edgeasync-hub.service"])
    assert manager.starts == ["env-3", "env-2"]


def test_a_peer_is_up_once_it_says_how_it_does(environments):
    manager = Manager(lambda: environments.current, {"env-3": "without a hub: alone"})
    up(environments, manager, PEER)
    assert environments.current.name == "env-3"


@pytest.mark.parametrize("said", ["", "looks for tcp://hub:5555: waiting", "joined-like words"])
def test_an_agent_that_does_not_join_gets_its_old_version_back(environments, said):
    manager = Manager(lambda: environments.current, {"env-3": said})
    with pytest.raises(
        HubUnreachableError, match=r"did not join its hub within 1 s .* the old one is running again"
    ):
        up(environments, manager)
    assert environments.current.name == "env-2"
    assert names(environments) == ["current", "env-1", "env-2"]
    assert manager.starts == ["env-3", "env-2"]


def test_an_upgrade_that_cannot_be_installed_touches_nothing(environments):
    def fail():
        raise StorageError("no such wheel")

    manager = Manager(lambda: environments.current, {})
    with pytest.raises(StorageError):
        up(environments, manager, make=fail)
    assert (environments.current.name, manager.starts) == ("env-2", [])


def test_an_upgrade_of_no_service_is_refused_before_anything_is_made(environments):
    class Empty(Manager):
        def status(self, unit):
            return {"LoadState": "not-found", "ActiveState": "inactive"}

    manager = Empty(lambda: environments.current, {})
    with pytest.raises(ConfigError, match="no such service; install it: edgeasync service install agent"):
        up(environments, manager)
    assert names(environments) == ["current", "env-1", "env-2"]


def test_a_service_that_cannot_be_started_leaves_nothing_of_the_new_one(environments):
    class Broken(Manager):
        def start(self, unit):
            raise StorageError("systemctl: no such bus")

    manager = Broken(lambda: environments.current, {})
    with pytest.raises(StorageError):
        up(environments, manager)
    assert names(environments) == ["current", "env-1", "env-2"]


def test_an_interrupted_upgrade_is_taken_back(environments):
    def interrupt(condition, limit_s):
        raise KeyboardInterrupt

    manager = Manager(lambda: environments.current, {})
    with pytest.raises(KeyboardInterrupt):
        up(environments, manager, wait=interrupt)
    assert (environments.current.name, manager.starts[-1]) == ("env-2", "env-2")


def test_a_status_of_before_the_upgrade_is_not_taken_for_the_new_one(environments):
    class Slow(Manager):
        def status(self, unit):
            return {"ActiveState": "active", "StatusText": "joined tcp://hub:5555", "InvocationID": "the old one"}

    manager = Slow(lambda: environments.current, {})
    with pytest.raises(HubUnreachableError):
        up(environments, manager)
