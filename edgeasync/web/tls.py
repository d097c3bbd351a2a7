"""The page's TLS certificate."""

import ssl
from pathlib import Path

from edgeasync.errors import ConfigError
from edgeasync.runtime.page_settings import PageSection


def files_of(page: PageSection) -> list[Path]:
    """Return the files of a page's certificate and key."""
    return [] if page.certificate is None else [Path(page.certificate), Path(page.key or page.certificate)]


def load_tls(page: PageSection) -> ssl.SSLContext | None:
    """Return a TLS context with the certificate of a page, or `None` without one. Raises `ConfigError`."""
    if page.certificate is None:
        return None
    certificate, key = files_of(page)
    for name, path in (("certificate", certificate), ("key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; correct {name} of [page] (--page-{name})"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except _PassphraseError:
        raise ConfigError(
            f"{key}: the key has a passphrase, but nobody can type it when the hub starts; write it without one: "
            "openssl pkey -in KEY -out NEW_KEY"
        ) from None
    except (OSError, ValueError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        what = (
            f"{key}: is the key of another certificate than {certificate}"
            if mismatch
            else f"{certificate}: contains no certificate with its key"
        )
        raise ConfigError(
            f"{what}; set certificate and key of [page] (--page-certificate, --page-key) to PEM files that belong "
            "together"
        ) from error
    return context


class _PassphraseError(Exception):
    pass


def _refuse_passphrase() -> str:
    raise _PassphraseError
