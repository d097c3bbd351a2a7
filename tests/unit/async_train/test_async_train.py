"""The toolbox stays thin, and says who a process is."""

import pytest

from edgeasync import async_train


def test_every_name_is_there():
    assert all(getattr(async_train, name) for name in dir(async_train))
    with pytest.raises(AttributeError, match="AsyncServer"):
        async_train.AsyncServer  # noqa: B018
