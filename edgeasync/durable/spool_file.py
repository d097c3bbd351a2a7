"""Store a device's unanswered update and its model on disk, for `spool = "full"`.

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
"""The supported format. A file in another format is not read, and the hub sends the whole model."""

SPOOL_FORMAT = "edgeasync-spool-1"
"""The supported format.

A file is renamed if it has another format, or if its update has another protocol version.
"""

_PAYLOAD, _RESIDUAL, _TRAINER, _MODEL = "payload", "residual", "trainer.", "model"


class SpoolFile:
    """The files of a device with `spool = "full"`. Each file is replaced as a whole.

    The spool is about as large as the payload, the residual and the trainer's state together. The
    file of the stored model is about as large as the model. While a file is replaced, it needs
    twice its size on disk.
    """

    def __init__(self, folder: Path, state_id: str) -> None:
        self._spool = KeptArrays(folder / SPOOL_FILE, SPOOL_FORMAT, state_id)
        self._held = KeptArrays(folder / HELD_FILE, HELD_FORMAT, state_id)

    @property
    def path(self) -> Path:
        """The path of the spool."""
        return self._spool.path

    def read(self) -> Spool | None:
        """Return the stored spool, or `None` if the file is missing.

        Raises `StorageError` if the file cannot be read. Raises `ProtocolError` if it is damaged or
        belongs to another device. In that case, call `put_aside` to begin a new spool.
        """
        found = self._spool.read()
        return None if found is None else _to_spool(*found)

    def read_model(self) -> HeldModel | None:
        """Return the stored model.

        The result is `None` if the file is missing, damaged, or belongs to another device.
        """
        try:
            found = self._held.read()
            return None if found is None else _to_held(*found)
        except (StorageError, ProtocolError):
            return None  # the hub sends the whole model instead of a delta

    def write(self, spool: Spool) -> None:
        """Replace the spool and sync it to disk; raises `StorageError`."""
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
        """Rename the spool so that it can be inspected; return its new path. Raises `StorageError`."""
        return self._spool.put_aside()


def _to_spool(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> Spool:
    try:
        push = wire.decode(bytes.fromhex(metadata["push"]))
        if isinstance(push, Push):
            check_codec_name(push.codec)
        model = parse_json(metadata["model"], ModelKey)
        payload = arrays.pop(_PAYLOAD).data.cast("B")
    except (KeyError, ValueError, wire.UnsupportedVersionError) as error:
        raise ProtocolError(f"another version of edgeasync wrote it ({error})") from error
    if not isinstance(push, Push) or wire.checksum(payload) != push.checksum:
        raise ProtocolError("it contains no update, so another version of edgeasync wrote it")
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
