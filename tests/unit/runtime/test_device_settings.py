"""What agents and peers have in common."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer_settings import PeerSection


@pytest.mark.parametrize("section", [AgentSection, PeerSection])
def test_one_hub_or_several_with_whole_paths(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert({}, section, where="here").hubs == ()
    assert convert({"hub": "ipc://hub"}, section, where="here").hubs == (f"ipc://{tmp_path}/hub",)
    hubs = ("tcp://a:1", f"ipc://{tmp_path}/b")
    assert convert({"hub": ["tcp://a:1", "ipc://b"]}, section, where="here").hubs == hubs


@pytest.mark.parametrize(("key", "value"), [("device_id", "a b"), ("device_id", ".a"), ("hub", []), ("seed", -1)])
def test_mistakes(key, value):
    with pytest.raises(ConfigError, match=key):
        convert({key: value}, PeerSection, where="here")


def test_a_key_of_agents_and_peers_is_declared_once():
    common = {*AgentSection.__struct_fields__} & {*PeerSection.__struct_fields__}
    assert common == {*DeviceSection.__struct_fields__}
    own = [{*section.__annotations__} for section in (AgentSection, PeerSection)]
    assert not common & set.union(*own)
