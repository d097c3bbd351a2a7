"""Sources that compute their values while they are encoded."""

import numpy as np

from edgeasync.parameters import CHUNK
from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.codecs.coded_vectors import LONG, every_codec, long_vector, random


class Difference:
    """What an agent sends: the difference of two vectors, made where it is read."""

    def __init__(self, new, old):
        self.new, self.old = new, old
        self.length = new.size

    def read(self, start, stop, scratch):
        assert scratch.size >= stop - start <= CHUNK
        return np.subtract(self.new[start:stop], self.old[start:stop], out=scratch[: stop - start])


@every_codec
def test_a_source_that_is_no_vector_is_coded_alike(name):
    new, old = long_vector(1), long_vector(2)
    codec = make_codec(name, LONG)
    of_vector = codec.encode(VectorSource(new - old), random())
    assert bytes(codec.encode(Difference(new, old), random())) == bytes(of_vector)
