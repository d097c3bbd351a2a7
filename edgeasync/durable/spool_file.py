"""Store a device's unanswered update and model on disk, for `spool = "full"`.

This module is separate from `identity`, so that a device without a spool does not import it.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.durable.kept_arrays import KeptArrays
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import check_codec_name
from edgeasync.protocol.messages import ModelVersion, Push
from edgeasync.structs import parse_json

SPOOL_FILE = "spool.safetensors"
HELD_FILE = "model.safetensors"
HELD_FORMAT = "edgeasync-held-1"
"""A file of another format is not read; the hub then sends the whole model."""

SPOOL_FORMAT = "edgeasync-spool-1"
"""A file of another format, or with an update of another protocol version, is renamed and not read.
"""

_PAYLOAD, _RESIDUAL, _TRAINER, _MODEL = "payload", "residual", "trainer.", "model"


class SpoolFile:
    """The files of a device with `spool = "full"`, each replaced as a whole.

    The spool is about as large as payload, residual and trainer's state together, the other file as
    the model. Each needs twice that space while it is replaced.
    """

    def __init__(self, folder: Path, state_id: str) -> None:
        self._spool = KeptArrays(folder / SPOOL_FILE, SPOOL_FORMAT, state_id)
        self._held = KeptArrays(folder / HELD_FILE, HELD_FORMAT, state_id)

    @property
    def path(self) -> Path:
        """The spool's file."""
        return self._spool.path

    def read(self) -> Spool | None:
        """Return the stored spool; `None` if there is no file.

        Raises `StorageError` if it cannot be read. Raises `ProtocolError` if it is damaged or
        another device's; then call `put_aside` to begin a new one.
        """
        found = self._spool.read()
        return None if found is None else _to_spool(*found)

    def read_model(self) -> HeldModel | None:
        """Return the stored model; `None` if it is missing, damaged or another device's."""
        try:
            found = self._held.read()
            return None if found is None else _to_held(*found)
        except (StorageError, ProtocolError):
            return None  # the hub sends the whole model instead of a delta

    def write(self, spool: Spool) -> None:
        """Replace the spool, synced to disk; raises `StorageError`."""
        arrays: dict[str, npt.NDArray[Any]] = {_PAYLOAD: np.frombuffer(spool.payload, np.uint8)}
        if spool.residual is not None:
            arrays[_RESIDUAL] = spool.residual
        arrays |= {_TRAINER + name: array for name, array in spool.trainer.items()}
        # The update is repeated in another session, so the secret session id is not stored.
        push = wire.encode(msgspec.structs.replace(spool.push, session=bytes(16))).hex()
        model = msgspec.json.encode(spool.model).decode()
        self._spool.write({"model": model, "push": push}, arrays)

    def write_model(self, held: HeldModel) -> None:
        """Replace the stored model; raises `StorageError`."""
        metadata = {
            "model": msgspec.json.encode(held.model).decode(),
            "version": msgspec.json.encode(held.version).decode(),
        }
        self._held.write(metadata, {_MODEL: held.values})

    def put_aside(self) -> Path:
        """Rename the spool for inspection; return its new path. Raises `StorageError`."""
        return self._spool.put_aside()


def _to_spool(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> Spool:
    try:
        push = wire.decode(bytes.fromhex(metadata["push"]))
        if isinstance(push, Push):
            check_codec_name(push.codec)
        model = parse_json(metadata["model"], ModelKey)
        payload = arrays.pop(_PAYLOAD).data.cast("B")
    except (KeyError, ValueError, wire.UnsupportedVersionError) as error:
        raise ProtocolError(f"written by another version of edgeasync ({error})") from error
    if not isinstance(push, Push) or wire.checksum(payload) != push.checksum:
        raise ProtocolError("written by another version of edgeasync (no update in it)")
    residual = arrays.pop(_RESIDUAL, None)
    return Spool(model, push, payload, residual, {n.removeprefix(_TRAINER): a for n, a in arrays.items()})


def _to_held(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> HeldModel | None:
    try:
        model = parse_json(metadata["model"], ModelKey)
        version = parse_json(metadata["version"], ModelVersion)
        values = arrays[_MODEL]
    except (KeyError, ValueError):
        return None
    if values.dtype != np.float32 or values.ndim != 1:
        return None
    return HeldModel(model, version, wire.checksum(values.data.cast("B")), values)
