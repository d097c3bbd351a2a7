"""Updates as they come in: coded, then opened."""

import numpy as np

from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.codecs import VectorSource, make_codec


def flat(length):
    """Return a model of one trained array."""
    return ParameterSpec((Parameter("weights", (length,)),))


def coded(values, codec="identity"):
    """Return a source of these values, all of them coded."""
    vector = np.ascontiguousarray(values, np.float32)
    maker = make_codec(codec, flat(len(vector)))
    return maker.open(bytes(maker.encode(VectorSource(vector))))
