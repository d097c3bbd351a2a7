"""What a peer's settings file may hold, and what it cannot begin without."""

import pytest

from edgeasync.config import parse_toml
from edgeasync.errors import ConfigError
from edgeasync.runtime.peer_settings import PeerSettings

WHOLE = '[peer]\npeers = "peers.toml"\ndata = "data.npz"\n'


def read(text):
    return parse_toml(text.encode(), PeerSettings, where="peer.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[throttle]", "unknown key `throttle`; that table belongs to an agent's settings file"),
        ("[agent]\nhub = 'tcp://h:1'", "unknown key `agent`; that table belongs to an agent's settings file"),
        (
            "[peer]\nhub = 'tcp://h:1'\npeers = 'peers.toml'",
            "peers and hub both define the list of peers; set only one of them",
        ),
        ("[peer]\nenrol = 'edgeasync1_'", "enrol requires the setting hub"),
        ("[peer]\naddress = 'tcp://h:1'", "address requires the setting hub"),
        (
            "[peer]\nhub = 'tcp://h:1'\naddress = 'ipc://here'",
            "address 'ipc://here' is invalid; set tcp://HOST:PORT",
        ),
        ("[peer]\nhub = 'tcp://h:1'\naddress = 'tcp://0.0.0.0:5600'", "stands for all addresses of this device"),
        ("[peer]\nmicro_batch_size = 8", "peer: unknown key `micro_batch_size`"),  # that is in [local]
        ("[peer]\ntopology = 'star'", "peer.topology: 'star' is not known; choose from all_to_all, ring"),
        ("[peer]\ncodec = 'top_k(0.1)'", "top_k"),
        ("[peer]\nsteps_max = 1\nepochs = 1", "only one of them"),
        ("[peer]\ndevice_id = 'a b'", "device_id 'a b' is invalid"),
        ("[model]\nkind = 'softmax'\ninputs = 2\nclasses = 2\nlocal = ['head']", "peers average all arrays"),
    ],
)
def test_mistakes(text, said):
    with pytest.raises(ConfigError, match=said):
        read(text)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "no peers are set"),
        ("[peer]\nhub = 'tcp://h:1'", "no address is set"),
        ("[peer]\npeers = 'peers.toml'", "no data is set"),
        (WHOLE, ""),
    ],
)
def test_what_is_missing(text, missing):
    assert read(text).missing().startswith(missing)
    assert bool(read(text).missing()) == bool(missing)
