"""Damages valid inputs, in ways that readers of bytes get wrong: lengths, ends, and parts in other places."""

import math

import msgpack

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
"""Values that lengths and counts overflow at."""

NASTY_VALUES = [
    None, True, -1, -(2**63), 2**53 + 1, 2**64 - 1, -0.5, 1e308, math.nan, math.inf, -math.inf,
    "", "x\n", "\x00", "x" * 2000, b"", b"\xff" * 15, b"\xff" * 17, "A" * 22 + "==", [], {}, [[]], [1] * 20,
    {"": None}, {b"a": 1}, ["applied"], ["applied", -1], ["duplicate", ["duplicate", ["applied", 1]]], ["no"],
    msgpack.Timestamp(0, 1), msgpack.ExtType(5, b"x"), msgpack.ExtType(5, bytes(16)),
]  # fmt: skip
"""What a reader of msgpack may be given in a field's place."""


def mutated(random, inputs):
    """Return one of the inputs, damaged in one place or a few."""
    content = bytearray(random.choice(inputs))
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        random.choice(_WAYS)(random, content, inputs)
    return bytes(content)


def _place(random, content):
    return random.randrange(len(content) + 1)


def _flip(random, content, inputs):
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _overwrite(random, content, inputs):
    if content:
        content[random.randrange(len(content))] = random.choice(
            (0, 1, 0x7F, 0x80, 0xC0, 0xFF, random.randrange(256))
        )


def _write_number(random, content, inputs):
    size, start = random.choice((1, 2, 4, 8)), _place(random, content)
    number = random.choice(NUMBERS) % (1 << 8 * size)
    content[start : start + size] = number.to_bytes(size, random.choice(("little", "big")))


def _truncate(random, content, inputs):
    del content[_place(random, content) :]


def _cut_out(random, content, inputs):
    start = _place(random, content)
    del content[start : start + random.randrange(1, 64)]


def _repeat(random, content, inputs):
    start = _place(random, content)
    part = bytes(content[start : start + random.randrange(1, 64)])
    content[start:start] = part * random.choice((1, 2, 16))


def _insert(random, content, inputs):
    start = _place(random, content)
    content[start:start] = random.randbytes(random.randrange(1, 16))


def _splice(random, content, inputs):
    other = random.choice(inputs)
    start, end = sorted((random.randrange(len(other) + 1), random.randrange(len(other) + 1)))
    place = _place(random, content)
    content[place : place + random.choice((0, end - start))] = other[start:end]


def _nest(random, content, inputs):
    """Insert the beginnings of many lists or tables, of JSON, TOML or msgpack: readers that recurse end there."""
    place = _place(random, content)
    content[place:place] = random.choice((b"[", b'{"":', b"\x91")) * random.choice((200, 2000, 20_000))


def _spoil_text(random, content, inputs):
    """Insert what is not UTF-8, what ends the name of a file, or a number that does not fit into 64 bits."""
    place = _place(random, content)
    content[place:place] = random.choice(
        (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"1e999", b"-", b"NaN", b"9" * 400)
    )


_WAYS = (
    *(_flip, _flip, _overwrite, _write_number, _write_number, _truncate, _cut_out, _repeat, _insert, _splice),
    *(_nest, _spoil_text),
)
