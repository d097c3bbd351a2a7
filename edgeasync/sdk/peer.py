"""`Peer`: a device in a Python program that averages its model with other devices, without a hub."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.config import convert, whole_path
from edgeasync.core.peer.effects import PeerReport
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.losses import LossSetting
from edgeasync.runtime.peer import PeerModel, PeerRuntime
from edgeasync.runtime.peer_device import find_name, make_peer
from edgeasync.runtime.peer_settings import PeerSection, PeerSettings
from edgeasync.sdk import events
from edgeasync.sdk.models import (
    Prepared,
    as_dataset,
    check_training,
    graph_settings,
    local_training,
    prepare,
)
from edgeasync.sdk.plan import as_path
from edgeasync.sdk.service import Service
from edgeasync.sdk.shares import is_trainer

LOG = logging.getLogger("edgeasync.peer")


class Peer(Service):
    """A device that trains and averages its model with other peers, without a hub.

    - `data`: a `Dataset`, a tuple `(x, y)` or a file path; or your own trainer, which contains its
      data.
    - `model`: as for `edgeasync.train`. With your own trainer, it may also be a dict of named arrays
      to start from.
    - `state`: the folder that stores this device's key and model; a later start resumes from it.
    - `peers`: the file that lists all peers, which is identical on every device
      (docs/train/peers.md).
    - `hub`: instead of `peers`, the address of a hub that provides the list of peers. This also
      requires `address="tcp://HOST:PORT"`, at which the other peers reach this device. The first
      start also requires `enrol`, a token from `edgeasync keys enrol`.
    - `name`: this device's name in the list of peers; by default this machine's name. A hub assigns
      the name when the device enrols.
    - `optimizer`, `batch_size`, `keep_optimizer_state`: settings of the peer's local steps.
    - `loss`, `output`, `train`, `freeze`, `recompute`, `lora`, `base`: as for `edgeasync.train`.
    - `on_report`: a function that is called with each report on the peer's event loop. A report has
      the attributes `event`, `peer` and `detail`.
    - Other keyword arguments are keys of `[peer]` in a settings file, such as
      `topology="all_to_all"` or `codec="float16"`. With `epochs` or `steps_max`, the peer trains
      that much, takes part in one more round, and ends. Otherwise it ends at `stop`.

    The peer trains alone until another peer connects. Its first start creates a key, and reports
    the entry to add to the file `peers`:

    >>> import tempfile
    >>> import numpy as np
    >>> from edgeasync import Peer
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> model, data = SoftmaxModel(inputs=4, classes=2), (np.eye(4), [0, 1, 0, 1])
    >>> peer = Peer(data, model, peers="none/peers.toml", state=tempfile.mkdtemp(), name="pi-1")
    >>> peer.start()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    edgeasync.errors.ConfigError: ...: no such file; create it with the same content on every device: ...
    """

    def __init__(
        self,
        data: object,
        model: object,
        *,
        state: str | Path,
        peers: str | Path | None = None,
        hub: str | Sequence[str] | None = None,
        name: str | None = None,
        optimizer: object = None,
        batch_size: int | None = None,
        keep_optimizer_state: bool | None = None,
        loss: LossSetting = "cross_entropy",
        output: str | None = None,
        train: str | Sequence[str] = (),
        freeze: str | Sequence[str] = (),
        on_report: Callable[[PeerReport], None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if twice := sorted({*_INSTEAD} & settings.keys()):
            raise ConfigError(f"{twice[0]} is a key of a settings file; {_INSTEAD[twice[0]]}")
        self._state = as_path(state, "state")
        more = {name: settings.pop(name) for name in ("recompute", "lora", "base") if name in settings}
        self._graph = graph_settings(loss, output, train, freeze, **more)
        said = {"peers": peers, "hub": hub, "state": str(self._state), "device_id": name}
        section = convert({**settings, **said}, PeerSection, where="Peer")
        if peers is None and (hub is None or section.address is None):
            raise ConfigError(
                "Peer needs the list of peers: pass peers='peers.toml', or pass hub= and address=, the address at "
                "which the other peers reach this device"
            )
        if section.epochs is not None and is_trainer(data):
            raise ConfigError("epochs counts passes over the data: with your own trainer, set steps_max instead")
        local = local_training(optimizer, batch_size, keep_optimizer_state=keep_optimizer_state)
        check_training(model, local)
        self._settings = PeerSettings(peer=section, local=local)
        self._data = whole_path(data)
        self._model = whole_path(model)
        self._on_report = on_report
        self._folder = DeviceFolder(self._state)
        self._prepared: Prepared | None = None
        self._peer: PeerRuntime | None = None
        self._begun_s = time.monotonic()

    @property
    def connected(self) -> bool:
        """Whether any other peer is connected."""
        return self._peer is not None and self._peer.connected

    @property
    def rounds(self) -> int:
        """The number of rounds that this device has taken part in."""
        return 0 if self._peer is None else self._peer.rounds

    @property
    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """A copy of the model's arrays; during training, it may contain a partly completed step."""
        peer, _ = self._begun()
        return dict(peer.spec.views(peer.parameters.copy()))

    def evaluate(self, data: object) -> events.Evaluation:
        """Evaluate the current model in the calling thread.

        `data` is as for `Peer`, or a function of the named arrays. The function returns a loss, or
        a loss and an accuracy. Raises `EdgeAsyncError` if the peer has not started, and `DataError`
        for unusable data.
        """
        self._check_may_wait("evaluate", "write `await asyncio.to_thread({0}.evaluate, data)`")
        peer, prepared = self._begun()
        vector, steps = peer.parameters.copy(), peer.steps_total
        found = prepared.evaluator(data, "data")(vector)
        now_s = time.monotonic() - self._begun_s
        return events.Evaluation(time_s=now_s, version=steps, loss=found.loss, accuracy=found.accuracy)

    def _begun(self) -> tuple[PeerRuntime, Prepared]:
        if self._peer is None or self._prepared is None:
            raise EdgeAsyncError("this peer has not started: use it inside `with` or after start()")
        return self._peer, self._prepared

    # -- how it runs -----------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        try:
            peer = self._peer = await asyncio.to_thread(self._make)
            if self._stopping:
                peer.request_stop()
            self._note_ready()
            return await peer.run()
        finally:
            self._folder.close()

    def _make(self) -> PeerRuntime:
        """Prepare the model, open the state folder and create the peer runtime."""
        section, local = self._settings.peer, self._settings.local
        data: Any = self._data
        dataset = None if is_trainer(data) else as_dataset(data, "data")
        prepared = prepare(self._model, dataset, local, graph=self._graph, run=self._state, seed=0)
        local.check_model(prepared.spec, prepared.loss, in_chunks=prepared.in_chunks)
        trainer = data if dataset is None else prepared.make_trainer(dataset, section.seed, section.cores_used)
        peer = make_peer(
            self._settings,
            self._folder.open(find_name(section, self._state)),
            PeerModel(trainer, np.array(prepared.initial), frozen=prepared.frozen),
            examples=0 if dataset is None else len(dataset),
            on_report=self._report,
        )
        self._prepared = prepared
        return peer

    def _request_stop(self) -> None:
        if self._peer is not None:
            self._peer.request_stop()

    def _report(self, report: PeerReport) -> None:
        level = logging.WARNING if report.event in ("warning", "refused") else logging.INFO
        LOG.log(level, "%s: %s", report.event, ": ".join(filter(None, (report.peer, report.detail))))
        if self._on_report is not None:
            self._on_report(report)


_INSTEAD = {
    "device_id": "pass name instead",
    "out": "save `arrays` after the peer has ended",
}
"""Advice about keys of `[peer]` that are not arguments of `Peer`."""
