"""Copies between numpy arrays and the tensors of a module.

CPU tensors are copied one by one. Tensors on one GPU are gathered in a flat buffer there. A single
copy on a separate stream transfers this buffer to or from pinned memory.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgeasync.parameters import Arrays
from edgeasync.sdk.torch_modules import read_tensors, write_tensors


class Link:
    """A CUDA GPU with a side stream and buffers. Tests replace this class."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def host_buffer(self, length: int) -> Tensor:
        """Allocate float32 values in pinned memory."""
        return torch.empty(length, dtype=torch.float32, pin_memory=True)

    def device_buffer(self, length: int) -> Tensor:
        """Allocate float32 values on the GPU.

        torch reuses the memory only after the side stream's work.
        """
        buffer = torch.empty(length, dtype=torch.float32, device=self._device)
        buffer.record_stream(self._side)
        return buffer

    def mark(self) -> torch.cuda.Event:
        """Record an event in the current stream, after all work queued so far."""
        return self._event_on(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy on the side stream, after this stream's earlier copies and the event `after`."""
        self._side.wait_event(after)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        return self._event_on(self._side)

    def order(self, event: torch.cuda.Event) -> None:
        """Make later work in the current stream wait for `event`; the caller does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _event_on(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # a waiting thread does not occupy a CPU core
        stream.record_event(event)
        return event


def link_to(device: torch.device) -> Link | None:
    """Return a link to a CUDA GPU, or `None` for other devices."""
    return Link(device) if device.type == "cuda" else None


class Copies:
    """Copies the tensors of one module; buffers are allocated once and then reused.

    Call the methods from the loop's thread. Only `stage` and the function that `begin_read` returns
    may be called from another thread.
    """

    def __init__(self, link_of: Callable[[torch.device], Link | None] | None = None) -> None:
        self._link_of = link_of or link_to
        self._flat: tuple[torch.device, _Flat | None] | None = None

    def read(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
        """Copy tensors into arrays."""
        self.begin_read(tensors, arrays)()

    def begin_read(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> Callable[[], None]:
        """Copy the tensors' current values.

        Return a function that fills `arrays`; call it once, from any thread.
        """
        if (flat := self._flat_of(tensors, arrays)) is not None:
            return flat.begin_read(tensors, arrays)
        read_tensors(tensors, arrays)
        return _nothing

    def write(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
        """Copy arrays into tensors."""
        if (flat := self._flat_of(tensors, arrays)) is not None:
            flat.write(tensors, arrays)
        else:
            write_tensors(tensors, arrays)

    def stage(self, arrays: Arrays) -> None:
        """Copy `arrays` to pinned memory for the next `add`, which must use the same arrays."""
        if self._flat is not None and self._flat[1] is not None:
            self._flat[1].stage(arrays)

    def add(self, tensors: Mapping[str, Tensor], arrays: Arrays, trained: Collection[str]) -> None:
        """Add the arrays named in `trained` to their tensors, and copy the other arrays into theirs.

        Call `stage` with the same arrays first.
        """
        added = [name in trained for name in arrays]
        if (flat := self._flat_of(tensors, arrays)) is not None:
            flat.add(tensors, arrays, added)
            return
        parts = [torch.from_numpy(array).to(tensors[name].device) for name, array in arrays.items()]
        _move([tensors[name] for name in arrays], parts, added)

    def _flat_of(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> "_Flat | None":
        """Return the flat buffers if all tensors are on one GPU, otherwise `None`."""
        devices = {tensors[name].device for name in arrays}
        if len(devices) != 1:
            return None
        device = devices.pop()
        length = sum(array.size for array in arrays.values())
        if self._flat is None or self._flat[0] != device or (self._flat[1] and self._flat[1].length != length):
            link = self._link_of(device)
            self._flat = device, None if link is None else _Flat(link, length)
        return self._flat[1]


class _Staged(NamedTuple):
    """Values in pinned memory, and the event after the last copy from this memory."""

    host: Tensor
    sent: torch.cuda.Event | None


class _Flat:
    """A flat buffer on a GPU, and pinned buffers; GPU work runs in the order of the calls.

    Reads and writes share one pinned buffer. `stage` has a separate pinned buffer, because it is
    called in another thread.
    """

    def __init__(self, link: Link, length: int) -> None:
        self.length = length
        self._link = link
        self._device = link.device_buffer(length)
        self._host = link.host_buffer(length)
        self._host_is_free = threading.Semaphore()
        self._copied: torch.cuda.Event | None = None
        """The event at the end of the last copy."""
        self._used = link.mark()
        """The event after the training stream's last use of the flat buffer."""
        self._staged: _Staged | None = None

    def begin_read(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> Callable[[], None]:
        self._host_is_free.acquire()  # an unfinished read uses both buffers
        with torch.no_grad():
            torch._foreach_copy_(*_pairs(self._device, tensors, arrays))
        self._used = self._link.mark()
        copied = self._copied = self._link.copy(self._host, self._device, self._used)

        def end() -> None:
            try:
                copied.synchronize()
                for array, part in zip(arrays.values(), _parts(self._host, arrays), strict=True):
                    np.copyto(array, part.numpy().reshape(array.shape))
            finally:
                self._host_is_free.release()

        return end

    def write(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
        with self._host_is_free:
            if self._copied is not None:
                self._copied.synchronize()  # an earlier write may still read the pinned buffer
            _fill(self._host, arrays)
            self._to_device(self._host, tensors, arrays, [False] * len(arrays))

    def stage(self, arrays: Arrays) -> None:
        if self._staged is None:
            self._staged = _Staged(self._link.host_buffer(self.length), None)
        host, sent = self._staged
        if sent is not None:
            sent.synchronize()
        _fill(host, arrays)

    def add(self, tensors: Mapping[str, Tensor], arrays: Arrays, added: Sequence[bool]) -> None:
        if self._staged is None:
            self.stage(arrays)
        assert self._staged is not None
        host = self._staged.host
        self._to_device(host, tensors, arrays, added)
        self._staged = _Staged(host, self._copied)

    def _to_device(
        self, host: Tensor, tensors: Mapping[str, Tensor], arrays: Arrays, added: Sequence[bool]
    ) -> None:
        """Copy pinned values to the flat buffer, and then copy or add them to the tensors."""
        self._copied = self._link.copy(self._device, host, self._used)
        self._link.order(self._copied)
        parts, targets = _pairs(self._device, tensors, arrays)
        _move(targets, parts, added)
        self._used = self._link.mark()


def _move(targets: list[Tensor], parts: list[Tensor], added: Sequence[bool]) -> None:
    """Copy or add float32 values to tensors, with one kernel launch per dtype."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for target, part, is_added in zip(targets, parts, added, strict=True):
        groups.setdefault((target.dtype, is_added), []).append((target, part.to(target.dtype)))
    with torch.no_grad():
        for (_, is_added), pairs in groups.items():
            ours, theirs = [target for target, _ in pairs], [part for _, part in pairs]
            (torch._foreach_add_ if is_added else torch._foreach_copy_)(ours, theirs)


def _pairs(flat: Tensor, tensors: Mapping[str, Tensor], arrays: Arrays) -> tuple[list[Tensor], list[Tensor]]:
    """Return the flat buffer's parts, in the shapes of the tensors, and the tensors."""
    chosen = [tensors[name].detach() for name in arrays]
    return [part.view(one.shape) for part, one in zip(_parts(flat, arrays), chosen, strict=True)], chosen


def _parts(flat: Tensor, arrays: Arrays) -> list[Tensor]:
    ends = accumulate((array.size for array in arrays.values()), initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


def _fill(host: Tensor, arrays: Arrays) -> None:
    for part, array in zip(_parts(host, arrays), arrays.values(), strict=True):
        np.copyto(part.numpy().reshape(array.shape), array)


def _nothing() -> None:
    """Do nothing, because the values have already been copied."""
