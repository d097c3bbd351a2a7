"""The tokens of the page: the viewer's and the operator's, in files that only the hub's user can read."""

import hmac
import os
import secrets
from pathlib import Path

import msgspec

from edgeasync.durable.secret_files import read_secret, write_secret
from edgeasync.errors import StorageError

VIEWER_FILE, OPERATOR_FILE = "page-viewer.token", "page-operator.token"

CHARACTERS_MIN, CHARACTERS_MAX = 16, 256
"""Limits to the length of a token, because an administrator may write the files."""

ANOTHER = "delete it, and the hub creates another"


class PageTokens(msgspec.Struct, frozen=True):
    """The two tokens of a page, and the folder of their files. `Reloaded` replaces them on a change."""

    folder: Path
    viewer: str
    operator: str

    @classmethod
    def open(cls, folder: Path) -> "PageTokens":
        """Read the tokens in a folder, and create missing ones. Raises `StorageError`."""
        tokens = cls(folder, _open(folder / VIEWER_FILE), _open(folder / OPERATOR_FILE))
        if tokens.is_operator(tokens.viewer):
            raise StorageError(
                f"{folder / VIEWER_FILE}: the same token as in {OPERATOR_FILE}, so viewers could give orders; "
                f"{ANOTHER}"
            )
        return tokens

    @classmethod
    def unknown(cls, folder: Path) -> "PageTokens":
        """Return tokens that nobody knows, because the files in a folder cannot be used."""
        return cls(folder, _draw(), _draw())

    @property
    def files(self) -> tuple[Path, Path]:
        """The files of the tokens."""
        return self.folder / VIEWER_FILE, self.folder / OPERATOR_FILE

    def is_operator(self, token: str) -> bool:
        """Return whether a token is the operator's. The time does not depend on the characters."""
        return _same(token, self.operator)

    def is_known(self, token: str) -> bool:
        """Return whether a token is the viewer's or the operator's."""
        return _same(token, self.viewer) | _same(token, self.operator)


def _draw() -> str:
    return secrets.token_urlsafe(32)


def _open(path: Path) -> str:
    if not os.path.lexists(path):
        write_secret(path, f"{_draw()}\n".encode())
    token = read_secret(path, absent="restart the hub", known=ANOTHER).decode(errors="replace").strip()
    fits = CHARACTERS_MIN <= len(token) <= CHARACTERS_MAX
    if not fits or not token.isascii() or not token.isprintable() or " " in token:
        raise StorageError(
            f"{path}: not a token of {CHARACTERS_MIN} to {CHARACTERS_MAX} ASCII characters without "
            f"spaces; {ANOTHER}"
        )
    return token


def _same(token: str, known: str) -> bool:
    return hmac.compare_digest(token.encode(), known.encode())
