"""The tokens of the page: the viewer's and the operator's, in files that only the hub's user can read."""

import hmac
import secrets
from pathlib import Path

import msgspec

from edgeasync.durable.secret_files import read_secret, write_secret
from edgeasync.errors import StorageError

VIEWER_FILE, OPERATOR_FILE = "page-viewer.token", "page-operator.token"

CHARACTERS_MIN = 16
"""Minimum length of a token, because an administrator may write the files."""


class PageTokens(msgspec.Struct, frozen=True):
    """The two tokens of a page, and the folder of their files."""

    folder: Path
    viewer: str
    operator: str

    @classmethod
    def open(cls, folder: Path) -> "PageTokens":
        """Read the tokens in a folder, and create missing ones. Raises `StorageError`."""
        return cls(folder, _open(folder / VIEWER_FILE), _open(folder / OPERATOR_FILE))

    def is_operator(self, token: str) -> bool:
        """Return whether a token is the operator's. The time does not depend on the characters."""
        return _same(token, self.operator)

    def is_known(self, token: str) -> bool:
        """Return whether a token is the viewer's or the operator's."""
        return _same(token, self.viewer) | _same(token, self.operator)


def _open(path: Path) -> str:
    if not path.exists() and not path.is_symlink():
        write_secret(path, f"{secrets.token_urlsafe(32)}\n".encode())
    restart = f"delete {path} and restart the hub, which then creates a new token"
    token = read_secret(path, absent="restart the hub").decode(errors="replace").strip()
    if len(token) < CHARACTERS_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise StorageError(f"{path}: is not a token of at least {CHARACTERS_MIN} characters; {restart}")
    return token


def _same(token: str, known: str) -> bool:
    return hmac.compare_digest(token.encode(), known.encode())
