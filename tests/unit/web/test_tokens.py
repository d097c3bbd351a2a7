"""The files of the page's tokens."""

import stat

import pytest

from edgeasync.errors import StorageError
from edgeasync.web.tokens import OPERATOR_FILE, VIEWER_FILE, PageTokens


def test_tokens_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    first = PageTokens.open(tmp_path)
    assert PageTokens.open(tmp_path) == first
    assert len({first.viewer, first.operator}) == 2
    assert min(len(first.viewer), len(first.operator)) >= 43
    for name in (VIEWER_FILE, OPERATOR_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_deleted_token_is_replaced_by_a_new_one(tmp_path):
    first = PageTokens.open(tmp_path)
    (tmp_path / VIEWER_FILE).unlink()
    second = PageTokens.open(tmp_path)
    assert second.viewer != first.viewer
    assert second.operator == first.operator


def test_an_administrator_may_choose_a_token(tmp_path):
    tokens = PageTokens.open(tmp_path)
    (tmp_path / VIEWER_FILE).write_text("  chosen-by-ansible-1234\n")
    assert PageTokens.open(tmp_path).viewer == "chosen-by-ansible-1234"
    assert tokens.is_known(tokens.operator)
    assert not tokens.is_operator(tokens.viewer)


def test_nobody_knows_the_tokens_of_files_that_cannot_be_used(tmp_path):
    unknown = PageTokens.unknown(tmp_path)
    assert not unknown.is_known("")
    assert unknown != PageTokens.unknown(tmp_path)
    assert unknown.files == (tmp_path / VIEWER_FILE, tmp_path / OPERATOR_FILE)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short\n",
        b"two words are no token at all",
        b"\xff" * 20,
        "schlüssel-der-seite".encode(),
        b"x" * 20 + b"\x1b[31m",
        b"x" * 300,
    ],
)
def test_a_file_without_a_token_is_refused_with_a_remedy(tmp_path, content):
    PageTokens.open(tmp_path)
    (tmp_path / OPERATOR_FILE).write_bytes(content)
    with pytest.raises(
        StorageError,
        match=r"page-operator.token: not a token of 16 to 256 ASCII characters .*; delete it, and the hub creates",
    ):
        PageTokens.open(tmp_path)


def test_a_token_that_others_can_read_is_refused(tmp_path):
    PageTokens.open(tmp_path)
    (tmp_path / VIEWER_FILE).chmod(0o644)
    with pytest.raises(
        StorageError, match=r"other users may have read it .* the hub creates another, or run chmod 600"
    ):
        PageTokens.open(tmp_path)


def test_viewers_do_not_get_the_operators_token(tmp_path):
    tokens = PageTokens.open(tmp_path)
    (tmp_path / VIEWER_FILE).write_text(tokens.operator)
    with pytest.raises(StorageError, match=r"page-viewer.token: the same token as in page-operator.token"):
        PageTokens.open(tmp_path)


def test_a_link_is_refused(tmp_path):
    (tmp_path / VIEWER_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        PageTokens.open(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
