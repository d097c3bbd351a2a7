"""Who may send which request to the page.

A browser runs scripts of other sites, which may send requests to the page, too. So the page checks
the names by which it is addressed (`Host`, against DNS rebinding) and the site that sends a request
(`Origin`). Tokens are accepted only in the header `Authorization`, which no browser adds by itself.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal
from urllib.parse import unquote_to_bytes

from edgeasync.web.tokens import OPERATOR_FILE, VIEWER_FILE, PageTokens

Role = Literal["anybody", "viewer", "operator"]

Reason = Literal["host", "origin", "url", "token", "role", "rate", "connections", "slow", "body", "busy"]
"""Why a request or a connection was refused."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?\Z")
_TOKEN_NAME = re.compile(r"(?:^|&)[^=&]*(?:token|key|auth|secret|password)", re.IGNORECASE)


class RequestRefusedError(Exception):
    """A request that is answered with an error. `sentence` is shown to the user."""

    def __init__(self, status: int, sentence: str, reason: Reason | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.reason = reason


class PageAccess:
    """Decides on requests. `refused` counts refusals by reason.

    `host` is the host on which the page listens, and `hosts` are further names of it. If
    `open_reading` is true, reading needs no token. `tokens` returns the tokens that are valid now.
    """

    def __init__(
        self,
        host: str,
        hosts: Iterable[str],
        tokens: Callable[[], PageTokens],
        refused: Counter[str],
        *,
        open_reading: bool,
    ) -> None:
        self._hosts = {"localhost", host.lower(), *map(str.lower, hosts)}
        self._tokens = tokens
        self._open_reading = open_reading
        self.refused = refused

    def check_site(self, headers: Mapping[str, str], local: str, path: str = "/api") -> None:
        """Raise `RequestRefusedError` unless the request is addressed to this page, and from it.

        `local` is the address of this machine to which the client has connected. Other sites may
        only contain links to the page itself.
        """
        host = headers.get("host", "").lower()
        found = _HOST.match(host)
        if found is None or not self._is_own(found[1].strip("[]"), local):
            raise RequestRefusedError(
                421,
                "the page is not known by this name; use the address that the hub printed, or add the name to "
                "hosts of [page] (--page-hosts NAME)",
                "host",
            )
        origin = headers.get("origin")
        foreign = origin is not None and origin.lower().partition("://")[2] != host
        is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if foreign or not (is_link or headers.get("sec-fetch-site", "none") in ("none", "same-origin")):
            raise RequestRefusedError(403, "another web site sent this request; open the page itself", "origin")

    def check_url(self, raw_path: bytes, query: bytes) -> None:
        """Raise `RequestRefusedError` for a URL with a token, which browsers and proxies may log."""
        text = unquote_to_bytes(raw_path + b"?" + query).decode(errors="replace")
        tokens = self._tokens()
        if tokens.viewer in text or tokens.operator in text or _TOKEN_NAME.search(text.partition("?")[2]):
            raise RequestRefusedError(
                400,
                "a token in a URL ends up in logs; send it in the header 'Authorization: Bearer TOKEN'. If this "
                "token is valid, delete its file, and the hub creates a new token",
                "url",
            )

    def check_role(self, headers: Mapping[str, str], needed: Role) -> None:
        """Raise `RequestRefusedError` unless the token of a request allows it."""
        said = headers.get("authorization")
        if needed == "anybody" or (said is None and needed == "viewer" and self._open_reading):
            return
        scheme, _, token = (said or "").partition(" ")
        tokens = self._tokens()
        if scheme.lower() != "bearer" or not tokens.is_known(token.strip()):
            file = OPERATOR_FILE if needed == "operator" else VIEWER_FILE
            what = "this needs a token" if said is None else "this token is not valid"
            raise RequestRefusedError(
                401,
                f"{what}; it is in the file {file}, whose folder the hub printed when it started; programs send "
                "it in the header 'Authorization: Bearer TOKEN'",
                "token",
            )
        if needed == "operator" and not tokens.is_operator(token.strip()):
            raise RequestRefusedError(
                403, f"the viewer's token only allows reading; use the token in the file {OPERATOR_FILE}", "role"
            )

    def count(self, error: RequestRefusedError) -> None:
        """Count a refusal."""
        if error.reason is not None:
            self.refused[error.reason] += 1

    def _is_own(self, host: str, local: str) -> bool:
        if host in self._hosts:
            return True
        try:
            number = ipaddress.ip_address(host)
            return number.is_loopback or number == ipaddress.ip_address(local)
        except ValueError:
            return False
