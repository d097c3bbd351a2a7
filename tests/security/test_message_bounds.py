"""Rate limits for the messages of one key."""

import pytest

from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX, HELLOS, MESSAGES, STATUS_REQUESTS, MessageBounds
from edgeasync.core.engine.token_bucket import Rate, TokenBucket

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_bucket_gives_its_burst_at_once_and_its_rate_for_ever():
    bucket = TokenBucket(Rate(2.0, 5.0), 0.0)
    assert sum(bucket.take(0.0) for _ in range(100)) == 5
    assert sum(bucket.take(step / 1000) for step in range(10_000)) == 19
    assert bucket.tokens(1e9) == 5.0


def test_one_key_says_so_much_and_another_is_not_held_to_it():
    bounds = MessageBounds()
    said = sum(bounds.allows(KEY, step / 20_000) for step in range(200_000))  # for 10 s
    assert said == pytest.approx(MESSAGES.burst + 10 * MESSAGES.per_s, abs=2)
    assert bounds.allows(OTHER, 10.0)


def test_a_long_header_counts_for_many():
    """Red before: a header of 16 KiB of empty arrays takes 5 ms to read, and one key could say 10,000 a second."""
    bounds = MessageBounds()
    said = sum(bounds.allows(KEY, step / 20_000, HEADER_BYTES_MAX) for step in range(200_000))  # for 10 s
    assert said <= 500
    assert all(bounds.allows(OTHER, step / 4000, 400) for step in range(40_000)), "a device that exchanges"


def test_hellos_and_status_requests_have_bounds_of_their_own():
    bounds = MessageBounds()
    assert sum(bounds.allows_hello(KEY, 0.0) for _ in range(10_000)) == HELLOS.burst
    assert sum(bounds.allows_status(KEY, 0.0, operator=False) for _ in range(1000)) == STATUS_REQUESTS.burst
    assert bounds.allows(KEY, 0.0)
    assert sum(bounds.allows_status(OTHER, 0.0, operator=True) for _ in range(100)) == 100
    assert bounds.denied == {"hellos": 10_000 - HELLOS.burst, "status": 1000 - STATUS_REQUESTS.burst}
