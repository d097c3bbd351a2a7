"""Digests of what every codec makes of vectors that hold each kind of float32: they are the same on every machine.

Run as `PYTHONPATH=. python tests/support/boards/codec_digests.py` it prints them as one JSON object, and fails if
they are not those kept in `codec_digests.json`; `--write` writes that file, after a change of a format. It needs
no test packages, so that it runs on a device. zstd is left out: its versions may write different frames.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import xxhash

from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.codecs import VectorSource, make_codec

GOLDEN = Path(__file__).with_name("codec_digests.json")
SPEC = ParameterSpec(
    (
        Parameter("matrix", (300, 301)),
        Parameter("bias", (301,)),
        Parameter("kernel", (16, 3, 5, 5)),
        Parameter("wide", (2, 40_000)),
        Parameter("mean", (7,), "statistic"),
    )
)
NAMES = (
    "identity",
    "float16",
    "bfloat16",
    "int8",
    "int8(stochastic)",
    "int4",
    "int4(stochastic)",
    "sign",
    "top_k(0.001)",
    "top_k(0.01)",
    "top_k(0.25)+int8",
)


def mix(count, seed):
    """Return 32-bit numbers that look random, by integer arithmetic alone."""
    state = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        state ^= state >> np.uint32(shift)
        state *= np.uint32(factor)
    return state


def vectors():
    """Return vectors by what is special about them."""
    length = SPEC.length
    mantissas, exponents = mix(length, 1), mix(length, 2)
    ordinary = ((mantissas & 0x807FFFFF) | (exponents % 12 + 108) << 23).view(np.float32)
    extreme = mantissas.copy().view(np.float32)
    extreme[~np.isfinite(extreme)] = 0.0
    sparse = ordinary.copy()
    sparse[exponents % 500 != 0] = 0.0
    equal = np.full(length, 2.0**-9, np.float32)
    broken = ordinary.copy()
    broken.view(np.uint32)[[5, 70_000, 150_000, -1]] = [0x7F800000, 0xFFC00000, 0x7F800001, 0x7FC00000]
    return {"ordinary": ordinary, "extreme": extreme, "sparse": sparse, "equal": equal, "broken": broken}


def digests():
    """Return digests of the payload and of the decoded vector, by codec and vector."""
    found = {}
    for name in NAMES:
        codec = make_codec(name, SPEC)
        for kind, vector in vectors().items():
            payload = codec.encode(VectorSource(vector), np.random.Generator(np.random.PCG64(1)))
            scratch = np.empty(SPEC.length, np.float32)
            decoded = codec.open(payload).read(0, SPEC.length, scratch)
            parts = (payload, decoded)
            found[f"{name} {kind}"] = " ".join(xxhash.xxh3_64_hexdigest(bytes(part)) for part in parts)
    return found


def main():
    """Print, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    found = digests()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if write:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for case in golden.keys() | found.keys():
        if golden.get(case) != found.get(case):
            sys.stderr.write(f"differs: {case}\n")
    return int(golden != found)


if __name__ == "__main__":
    sys.exit(main())
