"""Marks that updates leave in a model, by which it can be told which it holds."""

import numpy as np

from edgeasync.parameters import Parameter, ParameterSpec

LEARNT = 8
"""Values of the model that are really trained; the others count updates."""

SLOTS = 128
"""Updates of one device that are told apart."""


Mark = tuple[str, int]
"""An update: the device, and the how-manieth of its own it is."""


class Marks:
    """Where the marks of all devices are, and how to read them."""

    def __init__(self, names, unused):
        self.names = names
        self.spec = ParameterSpec((Parameter("w", (LEARNT + SLOTS * len(names) + unused,)),))
        self._scratch = np.empty(self.spec.length, np.float32)

    def place(self, name, number):
        return LEARNT + SLOTS * self.names.index(name) + number % SLOTS

    def is_sound(self, source):
        """Whether an update that travels as it is marks one slot and no other."""
        values = source.read(LEARNT, LEARNT + SLOTS * len(self.names), self._scratch)
        return np.count_nonzero(values) == 1 and values.max() == 1.0

    def in_model(self, vector, name):
        return vector[self.place(name, 0) : self.place(name, 0) + SLOTS]
