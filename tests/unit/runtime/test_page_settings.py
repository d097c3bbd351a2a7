"""Settings of the page: addresses, names, certificate and key."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.runtime.page_settings import is_local, split_address


def read(**page):
    return convert({"page": page}, RunSettings, where="hub.toml").page


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8555", ("127.0.0.1", 8555)), ("[::1]:1", ("::1", 1)), ("*:65535", ("*", 65535)),
        ("localhost:*", ("localhost", 0)),
    ],
)  # fmt: skip
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts
    assert read(bind=address).bind == address


@pytest.mark.parametrize(
    "address",
    ["", ":1", "8555", "localhost", "localhost:", "localhost:0", "localhost:65536", "localhost:1.5", "::1:80",
     "http://localhost:80", "tcp://localhost:80", "local host:80", "localhost:\u0661", "localhost:" + "1" * 5000],
)  # fmt: skip
def test_other_addresses_are_refused(address):
    with pytest.raises(ConfigError, match=r"hub.toml: .*is not an address; use HOST:PORT"):
        read(bind=address)


def test_only_loopback_addresses_are_local():
    assert all(map(is_local, ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"]))
    assert not any(
        map(is_local, ["*:1", "0.0.0.0:1", "[::]:1", "192.0.2.1:1", "hub:1", "localhost.evil.example:1"])
    )


@pytest.mark.parametrize("host", ["", "hub:8555", "http://hub", "a b", "h\u00fcb", "*", "a/b", "\x1b"])
def test_a_name_of_the_page_has_no_port(host):
    with pytest.raises(ConfigError, match=r"hosts contains .*use names such as 'hub.example.org'"):
        read(hosts=[host])


def test_a_key_needs_its_certificate():
    with pytest.raises(ConfigError, match="key needs certificate"):
        read(key="key.pem")
