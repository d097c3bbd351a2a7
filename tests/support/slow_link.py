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


class SlowLink:
    """A GPU whose side stream does nothing until it is waited for. Its memory is that of the CPU."""

    def __init__(self):
        self._torch = importlib.import_module("torch")
        self.copies = self.bytes = self.waits = self.buffers = 0
        self._queue = []
        self._done = 0

    def host_buffer(self, length):
        self.buffers += 1
        return self._torch.full((length,), self._torch.nan)

    device_buffer = host_buffer

    def mark(self):
        return Copied(self, self._done)  # the training stream works at once

    def copy(self, target, source, after):
        self.copies, self.bytes = self.copies + 1, self.bytes + 4 * len(source)
        self._queue.append((target, source))
        return Copied(self, self._done + len(self._queue))

    def order(self, event):
        self.finish(event._number)

    def finish(self, number):
        while self._done < number:
            target, source = self._queue.pop(0)
            target.copy_(source)
            self._done += 1
