"""A link between host and GPU, on a CPU, whose copies end as late as they may."""

import importlib


class Copied:
    """The end of a copy: it takes place once somebody waits, or later work of the training stream needs it."""

    def __init__(self, link, number):
        self._link = link
        self._number = number

    def synchronize(self):
        self._link.waits += 1
        self._link.finish(self._number)
        self._link.note_wait(self._number)


class SlowLink:
    """A GPU whose side stream does nothing until it is waited for. Its memory is that of the CPU."""

    def __init__(self):
        self._torch = importlib.import_module("torch")
        self.copies = self.bytes = self.waits = self.buffers = 0
        self._queue = []
        self._device = []
        self._read = []  # pinned memory that a copy may still be reading, as far as the host knows
        self._done = 0

    def host_buffer(self, length):
        self.buffers += 1
        return self._torch.full((length,), self._torch.nan)

    def device_buffer(self, length):
        self._device.append(self.host_buffer(length))
        return self._device[-1]

    def mark(self):
        return Copied(self, self._done)  # the training stream works at once

    def copy(self, target, source, after):
        self.copies, self.bytes = self.copies + 1, self.bytes + 4 * len(source)
        self._queue.append((target, source))
        number = self._done + len(self._queue)
        self._read = [each for each in self._read if each[1] is not target]  # copies take place in order
        if all(source is not buffer for buffer in self._device):
            assert all(source is not buffer for _, buffer, _ in self._read), "nobody has waited for the last copy"
            self._read.append((number, source, source.clone()))
        return Copied(self, number)

    def note_wait(self, number):
        """Note that the host knows of the end of all copies up to this one: it may change what they read."""
        for _, buffer, values in [each for each in self._read if each[0] <= number]:
            assert self._torch.equal(buffer, values), "it was changed before the host had waited"
        self._read = [each for each in self._read if each[0] > number]

    def order(self, event):
        self.finish(event._number)

    def finish(self, number):
        while self._done < number:
            target, source = self._queue.pop(0)
            target.copy_(source)
            self._done += 1
