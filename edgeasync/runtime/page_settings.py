"""Settings of the page in the browser and of metrics for Prometheus, which a hub may serve."""

import ipaddress

from edgeasync.config import FilePath, Section

PAGE_BIND = "127.0.0.1:8555"
"""The address that `--page` uses if it has no value."""

METRICS_BIND = "127.0.0.1:9555"
"""The address that `--metrics` uses if it has no value."""


class PageSection(Section, frozen=True):
    """`[page]`: the page in the browser that shows the fleet.

    `certificate`, `key`, `hosts` and `insecure` also apply to `[metrics]`.
    """

    bind: str | None = None
    """Address on which the hub serves its page, `HOST:PORT` such as `127.0.0.1:8555`. HOST is an
    address of this machine (IPv6 in brackets), or `*` for all addresses. If PORT is `*`, the hub
    selects a free port. Without this key, there is no page: [The page](/operate/page.md).
    """
    certificate: FilePath | None = None
    """TLS certificate of the page, a PEM file with the whole chain. Needed beyond this machine,
    unless `insecure` is set.
    """
    key: FilePath | None = None
    """Private key of the certificate, a PEM file without a passphrase. By default, `certificate`
    contains the key, too.
    """
    hosts: tuple[str, ...] = ()
    """Names by which browsers reach the page, such as `hub.example.org`, without a port. The
    address in `bind` and the names of this machine's loopback interface always work. With names,
    reading needs a token, even if `bind` is a loopback address.
    """
    insecure: bool = False
    """Serve the page beyond this machine without TLS, so that the network can read tokens."""

    def __post_init__(self) -> None:
        _check_bind(self.bind)
        if self.key is not None and self.certificate is None:
            raise ValueError("key needs certificate; set the certificate's file, too")
        for host in self.hosts:
            if not host or set(host) & set("/:*@ ") or not host.isascii() or not host.isprintable():
                raise ValueError(f"hosts contains {host!r}; use names such as 'hub.example.org', without a port")


class MetricsSection(Section, frozen=True):
    """`[metrics]`: metrics for Prometheus. A hub with a page serves them on the page's address, too."""

    bind: str | None = None
    """Address on which the hub serves only `/metrics`, `/healthz` and `/readyz`, like `bind` of
    `[page]`. Without this key, metrics are served only together with the page.
    """
    devices: tuple[str, ...] = ()
    """Patterns of device names, such as `["pump-*"]`, whose devices get series of their own, at
    most 1,000 devices. By default, no device has its own series, because each one needs memory in
    Prometheus.
    """

    def __post_init__(self) -> None:
        _check_bind(self.bind)


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port; 0 stands for `*`. Raises `ValueError`.

    >>> split_address("127.0.0.1:8555"), split_address("[::1]:*")
    (('127.0.0.1', 8555), ('::1', 0))
    """
    host, _, port = address.rpartition(":")
    valid = port == "*" or (port.isdecimal() and port.isascii() and 0 < int(port[:6]) <= 65_535)
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not valid or "/" in host or (":" in host and not bracketed) or any(map(str.isspace, host)):
        raise ValueError(f"bind is {address!r}, which is not an address; use HOST:PORT, such as 127.0.0.1:8555")
    return host.strip("[]"), 0 if port == "*" else int(port)


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address. Names other than localhost are not resolved."""
    host, _ = split_address(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_bind(bind: str | None) -> None:
    if bind is not None:
        split_address(bind)
