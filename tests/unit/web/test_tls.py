"""The certificate of the page."""

from pathlib import Path

import pytest

from edgeasync.config import FilePath
from edgeasync.errors import ConfigError
from edgeasync.runtime.page_settings import PageSection
from edgeasync.web.tls import load_tls

TLS = Path(__file__).parents[2] / "support/security/tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"


def load(certificate, key=None):
    return load_tls(PageSection(certificate=FilePath(certificate), key=None if key is None else FilePath(key)))


def test_without_a_certificate_there_is_no_tls():
    assert load_tls(PageSection()) is None


def test_the_key_may_be_in_a_file_of_its_own_or_with_the_certificate(tmp_path):
    assert load(CERTIFICATE, KEY) is not None
    both = tmp_path / "both.pem"
    both.write_bytes(CERTIFICATE.read_bytes() + KEY.read_bytes())
    assert load(both) is not None


def test_a_missing_file_is_named_with_its_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"absent: cannot be read: No such file.* \(--page-certificate\)"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"absent: cannot be read: .* \(--page-key\)"):
        load(CERTIFICATE, tmp_path / "absent")


@pytest.mark.parametrize("content", [CERTIFICATE.read_text(), "text", ""])
def test_a_file_without_a_certificate_and_its_key_is_refused(tmp_path, content):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigError, match="contains no certificate with its key; set certificate and key"):
        load(tmp_path / "file")


def test_the_key_of_another_certificate_is_refused():
    with pytest.raises(ConfigError, match=r"other_key.pem: is the key of another certificate"):
        load(CERTIFICATE, TLS / "other_key.pem")


def test_a_key_with_a_passphrase_is_refused():
    with pytest.raises(ConfigError, match=r"locked_key.pem: the key has a passphrase, .* write it without one"):
        load(CERTIFICATE, TLS / "locked_key.pem")
