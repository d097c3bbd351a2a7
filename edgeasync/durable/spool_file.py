"""A device's unanswered work and its model on disk, to resume with after a power cut: `spool = "full"`.

Separate from `identity`, so that a device without a spool does not import this.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.durable.files import replace_file
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import check_codec_name
from edgeasync.protocol.messages import ModelVersion, Push

SPOOL_FILE = "spool.safetensors"
HELD_FILE = "model.safetensors"
HELD_FORMAT = "edgeasync-held-1"
"""A file of another format is not read: the hub sends the whole model."""

SPOOL_FORMAT = "edgeasync-spool-1"
"""Another format is another software's, and is put aside; so is an update of another protocol version."""

_PAYLOAD, _RESIDUAL, _TRAINER, _MODEL = "payload", "residual", "trainer.", "model"


class SpoolFile:
    """What a device with `spool = "full"` keeps beside its identity: two files, each replaced as a whole.

    The spool is about as long as payload, residual and trainer's state together, the other file as the model. Each
    takes twice that while it is replaced.
    """

    def __init__(self, folder: Path, state_id: str) -> None:
        self.path = folder / SPOOL_FILE
        self._held = folder / HELD_FILE
        self._state_id = state_id

    def read(self) -> Spool | None:
        """Return what was kept; `None` if there is nothing.

        Raises `StorageError` if it cannot be read, `ProtocolError` if it is damaged or not this device's: then
        `put_aside` lets the device begin a new one.
        """
        found = self._read(self.path, SPOOL_FORMAT)
        return None if found is None else _to_spool(*found)

    def read_model(self) -> HeldModel | None:
        """Return the model that was kept; `None` if there is none, or none that is this device's and whole."""
        try:
            found = self._read(self._held, HELD_FORMAT)
            return None if found is None else _to_held(*found)
        except (StorageError, ProtocolError):
            return None  # the hub has the model: nothing is lost but a difference's saving

    def write(self, spool: Spool) -> None:
        """Keep this in place of what was kept before; returns when it would outlive a power cut.

        Raises `StorageError`.
        """
        arrays: dict[str, npt.NDArray[Any]] = {_PAYLOAD: np.frombuffer(spool.payload, np.uint8)}
        if spool.residual is not None:
            arrays[_RESIDUAL] = spool.residual
        arrays |= {_TRAINER + name: array for name, array in spool.trainer.items()}
        # The update is repeated in another session, so this one need not lie on the disk.
        push = wire.encode(msgspec.structs.replace(spool.push, session=bytes(16))).hex()
        model = msgspec.json.encode(spool.model).decode()
        self._write(self.path, {"format": SPOOL_FORMAT, "model": model, "push": push}, arrays)

    def write_model(self, held: HeldModel) -> None:
        """Keep this model in place of the one before; raises `StorageError`."""
        metadata = {
            "format": HELD_FORMAT,
            "model": msgspec.json.encode(held.model).decode(),
            "version": msgspec.json.encode(held.version).decode(),
        }
        self._write(self._held, metadata, {_MODEL: held.values})

    def put_aside(self) -> Path:
        """Rename the spool, so that a person may look at it. It replaces one that was put aside before.

        Returns its new path; raises `StorageError`.
        """
        aside = self.path.with_name(self.path.name + ".damaged")
        try:
            self.path.replace(aside)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be renamed: {error.strerror or error}; delete it") from error
        return aside

    def _write(self, path: Path, metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> None:
        metadata["state_id"] = self._state_id
        metadata["checksum"] = _checksum(metadata, arrays)
        replace_file(path, safetensors.numpy.save(arrays, metadata))

    def _read(self, path: Path, made: str) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]] | None:
        """Return metadata and arrays of a file of this format, checked; `None` if there is no file."""
        try:
            if not path.exists():
                return None
            with safetensors.safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be read: {error.strerror or error}; repair or delete it"
            ) from error
        except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise ProtocolError(f"damaged ({error})") from error
        if metadata.get("format") != made:
            raise ProtocolError("of another version of this software")
        checksum = metadata.pop("checksum", "")
        if checksum != _checksum(metadata, arrays):
            raise ProtocolError("damaged (it does not have its checksum)")
        if metadata.get("state_id") != self._state_id:
            raise ProtocolError("of another device")
        return metadata, arrays


def _to_spool(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> Spool:
    try:
        push = wire.decode(bytes.fromhex(metadata["push"]))
        if isinstance(push, Push):
            check_codec_name(push.codec)
        model = msgspec.json.decode(metadata["model"], type=ModelKey)
        payload = arrays.pop(_PAYLOAD).data.cast("B")
    except (KeyError, ValueError, msgspec.DecodeError) as error:
        raise ProtocolError(f"of another version of this software ({error})") from error
    if not isinstance(push, Push) or wire.checksum(payload) != push.checksum:
        raise ProtocolError("of another version of this software (it holds no update)")
    residual = arrays.pop(_RESIDUAL, None)
    return Spool(model, push, payload, residual, {n.removeprefix(_TRAINER): a for n, a in arrays.items()})


def _to_held(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> HeldModel | None:
    try:
        model = msgspec.json.decode(metadata["model"], type=ModelKey)
        version = msgspec.json.decode(metadata["version"], type=ModelVersion)
        values = arrays[_MODEL]
    except (KeyError, msgspec.DecodeError):
        return None
    if values.dtype != np.float32 or values.ndim != 1:
        return None
    return HeldModel(model, version, wire.checksum(values.data.cast("B")), values)


def _checksum(metadata: dict[str, str], arrays: dict[str, npt.NDArray[Any]]) -> str:
    """Return the XXH3 of everything in the file but itself, in an order of its own."""
    parts: list[wire.Buffer] = [msgspec.json.encode(sorted(metadata.items()))]
    for name, array in sorted(arrays.items()):
        parts += [f"{name} {array.dtype} {array.shape}".encode(), np.ascontiguousarray(array).data.cast("B")]
    return f"{wire.checksum(*parts):016x}"
