"""Payloads and decoded vectors are the same bits on every machine; `codec_digests.py` says how to ask one."""

import json

from tests.support.boards.codec_digests import GOLDEN, digests


def test_all_machines_find_the_same_bits():
    assert digests() == json.loads(GOLDEN.read_text(encoding="utf-8"))
