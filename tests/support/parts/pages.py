"""A client of a hub's page: requests by hand, so that a test decides about every byte."""

import http.client
import json
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.programs.processes import PATIENCE_S


class Answer(NamedTuple):
    """An answer of the page, its headers in lower case."""

    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class PageClient:
    """Sends requests to the page at a URL; `trusted` is a file of certificates."""

    def __init__(self, url, *, token=None, trusted=None):
        self.url = urlsplit(url)
        self.token = token
        self._tls = None if trusted is None else ssl.create_default_context(cafile=trusted)

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def request(self, method, path, *, token=None, headers=None, body=None, host=None):
        """Send one request on a connection of its own; `headers` replace the usual ones."""
        sent = {"Host": host or self.url.netloc, **(headers or {})}
        if (token := token or self.token) is not None:
            sent.setdefault("Authorization", f"Bearer {token}")
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        return self.say(f"{method} {path} HTTP/1.1\r\n{lines}{length}\r\n".encode() + (body or b""), method)

    def say(self, content, method="GET"):
        """Send bytes on a connection of its own, and return the first answer."""
        with self.connect() as connection:
            connection.sendall(content)
            return read_answer(connection, method)

    def connect(self):
        connection = socket.create_connection((self.url.hostname, self.url.port), PATIENCE_S)
        return connection if self._tls is None else self._tls.wrap_socket(connection, server_hostname="localhost")


def read_answer(connection, method="GET"):
    """Return the next answer on a connection."""
    answer = http.client.HTTPResponse(connection, method=method)
    answer.begin()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    return Answer(answer.status, headers, answer.read())
