"""Who may send which request, decided without a network."""

from collections import Counter
from pathlib import Path

import pytest

from edgeasync.web.access import PageAccess, RequestRefusedError
from edgeasync.web.tokens import PageTokens

TOKENS = PageTokens(Path("run"), "viewer-0123456789abcdef", "operator-0123456789abcdef")


def access(host="127.0.0.1", hosts=(), *, open_reading=False):
    return PageAccess(host, hosts, lambda: TOKENS, Counter(), open_reading=open_reading)


def refusal(check, *arguments):
    with pytest.raises(RequestRefusedError) as raised:
        check(*arguments)
    return raised.value


OWN = ["localhost", "localhost:8555", "127.0.0.1:8555", "127.9.9.9", "[::1]:8555", "LOCALHOST:1", "192.0.2.7:8555"]


@pytest.mark.parametrize("host", OWN)
def test_the_page_is_known_by_its_addresses_and_as_localhost(host):
    access("*").check_site({"host": host}, "192.0.2.7")


FOREIGN = [
    "", "evil.example", "localhost.evil.example", "evil.localhost", "192.0.2.8", "[2001:db8::1]",
    "127.0.0.1.evil.example", "127.1", "2130706433", "0x7f.1", "localhost@evil.example", "localhost:port",
    "localhost:8555:1", "[::1", "a" * 10_000, "localhost, evil.example", "\u202elocalhost", "<script>",
]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_the_page_refuses_other_names_because_their_owner_could_point_them_to_it(host):
    error = refusal(access("*", ["hub.example.org"]).check_site, {"host": host}, "192.0.2.7")
    assert (error.status, error.reason) == (421, "host")


def test_the_page_is_known_by_the_names_in_its_settings():
    access("*", ["Hub.example.org"]).check_site({"host": "hub.example.ORG:8555"}, "192.0.2.7")
    access("hub.example.org").check_site({"host": "hub.example.org"}, "192.0.2.7")


ORIGINS = ["null", "http://localhost:8556", "http://evil.example", "http://localhost", "localhost:8555", ""]


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_site_may_send_nothing(origin):
    error = refusal(access().check_site, {"host": "localhost:8555", "origin": origin}, "127.0.0.1")
    assert (error.status, error.reason) == (403, "origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "other"])
def test_a_browser_that_says_so_is_believed_that_another_site_sends_the_request(site):
    headers = {"host": "localhost:8555", "sec-fetch-site": site}
    assert refusal(access().check_site, headers, "127.0.0.1").reason == "origin"


def test_another_site_may_contain_a_link_to_the_page_but_to_nothing_else():
    headers = {"host": "localhost:8555", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    access().check_site(headers, "127.0.0.1", "/")
    assert refusal(access().check_site, headers, "127.0.0.1", "/api/models/best").reason == "origin"
    assert refusal(access().check_site, headers | {"sec-fetch-mode": "cors"}, "127.0.0.1", "/").reason == "origin"


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_the_page_itself_may_send_requests(site):
    headers = {"host": "localhost:8555", "origin": "http://localhost:8555", "sec-fetch-site": site}
    access().check_site(headers, "127.0.0.1")


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (b"/", b"token=x"), (b"/api/feed", b"a=1&Access_Token=x"), (b"/", b"api%4bey=1"), (b"/", b"t%6Fken=x"),
        (b"/" + TOKENS.viewer.encode(), b""), (b"/", b"q=" + TOKENS.operator.encode()),
        (b"/viewer%2D0123456789abcdef", b""),
    ],
)  # fmt: skip
def test_a_token_in_a_url_is_refused(path, query):
    error = refusal(access().check_url, path, query)
    assert (error.status, error.reason) == (400, "url")
    assert TOKENS.viewer not in error.sentence


def test_other_urls_are_fine():
    access().check_url(b"/api/devices/token%2F1", b"")
    access().check_url(b"/", b"q=pump")


BEARER = {"authorization": f"Bearer {TOKENS.viewer}"}
OPERATOR = {"authorization": f"bearer {TOKENS.operator}"}


def test_reading_needs_one_of_the_tokens():
    access().check_role(BEARER, "viewer")
    access().check_role(OPERATOR, "viewer")
    access().check_role({}, "anybody")
    error = refusal(access().check_role, {}, "viewer")
    assert (error.status, error.reason) == (401, "token")


def test_on_this_machine_reading_needs_no_token_but_a_wrong_one_is_told():
    access(open_reading=True).check_role({}, "viewer")
    assert refusal(access(open_reading=True).check_role, {"authorization": "Bearer x"}, "viewer").status == 401


@pytest.mark.parametrize(
    "said",
    ["", "Bearer", "Bearer ", "Basic dTpw", TOKENS.operator, f"Bearer {TOKENS.operator}x", "Bearer \u00e9" * 9],
)
def test_other_tokens_are_refused(said):
    for role in ("viewer", "operator"):
        error = refusal(access().check_role, {"authorization": said}, role)
        assert (error.status, error.reason) == (401, "token")
        assert TOKENS.operator not in error.sentence


@pytest.mark.parametrize("open_reading", [False, True])
def test_acting_needs_the_operators_token_even_on_this_machine(open_reading):
    check = access(open_reading=open_reading).check_role
    check(OPERATOR, "operator")
    assert refusal(check, BEARER, "operator").status == 403
    assert refusal(check, {}, "operator").status == 401
