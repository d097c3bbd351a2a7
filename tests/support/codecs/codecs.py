"""The codecs that are tested, and what they are tested with."""

import numpy as np

from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.codecs import STAGES

DENSE = ("identity", "float16", "bfloat16", "int8", "int8(stochastic)", "int4", "int4(stochastic)", "sign")
NAMES = (
    *DENSE,
    *("top_k(0.01)", "top_k(0.5)", "top_k(0.3)+int4", "top_k(0.2)+sign"),
    *(("identity+zstd", "int8+zstd", "top_k(0.1)+bfloat16+zstd") if "zstd" in STAGES else ()),
)


def flat(length, statistics=0):
    parameters = (Parameter("w", (length,)), *([Parameter("m", (statistics,), "statistic")] if statistics else []))
    return ParameterSpec(parameters)


def decode(codec, payload, length):
    return np.array(codec.open(payload).read(0, length, np.empty(length, np.float32)))
