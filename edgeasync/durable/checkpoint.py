"""Checkpoints of a run: each a safetensors file and a manifest, of which some are kept.

Both files are written under a temporary name, synced and renamed, the manifest last: its presence says that the
checkpoint is whole. A checkpoint's name is `checkpoint-<journal number>-<version>`, and a higher journal number
makes it newer, whatever the clock said; where both numbers were there already, `-2`, `-3` … follow.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from edgeasync.core.hub.evaluation_tracker import goodness
from edgeasync.durable.disk import Disk
from edgeasync.durable.json_file import check_json
from edgeasync.durable.tensors import read_tensors, tensor_parts
from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.protocol.wire import Buffer, checksum
from edgeasync.structs import resolve_type

FORMAT = 1
"""The only format that is read. Increase it when the manifest or the rules change."""

PIECE_BYTES = 1 << 20
"""Bytes that are checksummed and then written at a time, so that they come from the cache."""

Tensors = Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.uint8]]

_NAME = re.compile(r"checkpoint-([0-9]{10,})-([0-9]+)(?:-([0-9]+))?")
_TENSORS = ".safetensors"
_MANIFEST = ".json"
_PART = ".part"

_Digest = Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
_Count = Annotated[int, Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is of; `nbytes` and the checksums are filled in when it is written.

    `journal` is the number of the last journal record it covers, `now_s` the core's clock, `created_s` the wall
    clock, and `rules` are what decides the state's future: spec, policy and settings. `checksum` is the XXH3-64 of
    the safetensors file, `seal` that of the manifest with an empty seal.
    """

    format: int = FORMAT
    software: str
    fingerprint: str
    lineage: str
    version: _Count
    journal: _Count
    now_s: float
    updates_applied: _Count
    loss: float | None = None
    accuracy: float | None = None
    created_s: float
    rules: dict[str, Any] = {}
    nbytes: _Count = 0
    checksum: _Digest = ""
    seal: _Digest = ""


class ChosenCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint to recover from; `skipped` has a sentence about each that would have come before it."""

    name: str
    manifest: Manifest
    tensors: Tensors
    skipped: list[str]


class _Format(msgspec.Struct):
    format: int


class CheckpointStore:
    """The checkpoints of a run on a disk: the newest `keep`, and the one with the best evaluation.

    One that turned out to be damaged does not count as kept, and those of another model are left alone. Used by
    one thread at a time.
    """

    def __init__(self, disk: Disk, keep: int) -> None:
        assert keep >= 1
        self._disk = disk
        self._keep = keep
        self._damaged: set[str] = set()

    def write(self, manifest: Manifest, tensors: Tensors) -> str:
        """Write a checkpoint, remove those beyond what is kept, and return its name.

        The arrays are read twice without a lock: nobody may write to them meanwhile. Raises `OSError` as the
        disk does: the checkpoints there were are then still whole, and this one is either whole or not there.
        Raises `ValueError` for an array that is neither float32 nor uint8.
        """
        parts = tensor_parts(tensors)
        manifest = msgspec.json.decode(
            msgspec.json.encode(manifest), type=resolve_type(Manifest)
        )  # as it will be read
        name = self._free_name(manifest)
        try:
            nbytes, digest = self._replace(name + _TENSORS, parts)
            manifest = msgspec.structs.replace(manifest, format=FORMAT, nbytes=nbytes, checksum=digest, seal="")
            sealed = msgspec.structs.replace(manifest, seal=_seal(manifest))
            self._replace(name + _MANIFEST, [memoryview(msgspec.json.encode(sealed))])
        except OSError:
            with contextlib.suppress(OSError):  # what is half written would fill a full disk
                self._sweep()
            raise
        self._prune(manifest.fingerprint)
        return name

    def manifests(self) -> tuple[list[tuple[str, Manifest]], list[tuple[str, str]]]:
        """Return names and manifests, newest first, and names of those not readable with what is wrong with each.

        The checkpoints themselves are not read. Raises `StorageError` when the folder cannot be read.
        """
        try:
            return self._listing()
        except OSError as error:
            raise StorageError(f"the checkpoints cannot be read: {error}; fix the folder's rights") from error

    def load(self, name: str, fingerprint: str) -> tuple[Manifest, Tensors]:
        """Read a checkpoint and check all of it; the arrays are read-only views of the file's content.

        Raises `StorageError` for one that is damaged or of another format, and `ModelMismatchError` for one of a
        model whose spec has another fingerprint.
        """
        manifest = self._manifest(name)
        if manifest.fingerprint != fingerprint:
            raise ModelMismatchError(
                f"{name}: is of another model ({manifest.fingerprint}, not {fingerprint}); "
                "start the run with the model it began with, or choose another run folder"
            )
        try:
            tensors = self._tensors(name, manifest)
        except StorageError:
            self._damaged.add(name)
            raise
        return manifest, tensors

    def choose(self, recovery: str, fingerprint: str) -> ChosenCheckpoint | None:
        """Load the checkpoint to recover from, or return None if there is none at all.

        `recovery` is "latest", "best", or a checkpoint's name. The best has the highest accuracy, or else the
        lowest loss; where no version was evaluated it is the latest. Raises `StorageError` or `ModelMismatchError`
        when a named one cannot be used, or when there are checkpoints and none of them can be.
        """
        readable, unreadable = self.manifests()
        if recovery not in {"latest", "best"}:
            known = [name for name, _ in readable] + [name for name, _ in unreadable]
            if recovery not in known:
                there = ", ".join(known) or "none"
                raise StorageError(
                    f'{recovery}: is no checkpoint here; choose "latest", "best" or one of: {there}'
                )
            manifest, tensors = self.load(recovery, fingerprint)
            return ChosenCheckpoint(recovery, manifest, tensors, [])
        skipped = [reason for _, reason in unreadable]
        if recovery == "best":
            readable = best_first(readable)
        only_mismatches = not unreadable
        for name, _ in readable:
            try:
                manifest, tensors = self.load(name, fingerprint)
            except (StorageError, ModelMismatchError) as error:
                only_mismatches &= isinstance(error, ModelMismatchError)
                skipped.append(str(error))
            else:
                if recovery == "best" and _evaluation(manifest) is None:
                    skipped.append(
                        f"{name}: was not evaluated, but no usable checkpoint was, and it is the latest"
                    )
                return ChosenCheckpoint(name, manifest, tensors, skipped)
        if not skipped:
            return None
        kind = ModelMismatchError if only_mismatches else StorageError
        raise kind(f"no checkpoint can be used: {' | '.join(skipped)}")

    def covered(self, fingerprint: str) -> int:
        """Return through which number the journal may be dropped.

        That is what the newest checkpoint but one covers, so that it and the journal still give the exact state
        if the newest turns out to be damaged; with `keep` = 1, what the only one covers. Raises `OSError`.
        """
        spare = min(self._keep, 2) - 1
        usable = self._usable(fingerprint)
        return usable[spare][1].journal if len(usable) > spare else 0

    def _listing(self) -> tuple[list[tuple[str, Manifest]], list[tuple[str, str]]]:
        """Do what `manifests` does, but raise `OSError`."""
        readable: list[tuple[str, Manifest]] = []
        unreadable: list[tuple[str, str]] = []
        for name in self._names(_MANIFEST):
            try:
                readable.append((name, self._manifest(name)))
            except StorageError as error:
                unreadable.append((name, str(error)))
        return readable, unreadable

    def _usable(self, fingerprint: str) -> list[tuple[str, Manifest]]:
        """Return this model's checkpoints that are not known to be damaged, newest first."""
        return [
            (name, manifest)
            for name, manifest in self._listing()[0]
            if manifest.fingerprint == fingerprint and name not in self._damaged
        ]

    def _names(self, suffix: str) -> list[str]:
        """Return the names of checkpoints that have a file of that kind, newest first."""
        files = (name for name in self._disk.names() if name.endswith(suffix))
        return sorted(
            filter(_NAME.fullmatch, (file.removesuffix(suffix) for file in files)), key=_age, reverse=True
        )

    def _free_name(self, manifest: Manifest) -> str:
        """Return a name no checkpoint has: to replace one file of two would leave neither checkpoint whole."""
        name = f"checkpoint-{manifest.journal:010}-{manifest.version}"
        taken = [_age(known)[2] for known in self._names(_MANIFEST) if _age(known)[:2] == _age(name)[:2]]
        return f"{name}-{max(taken) + 1}" if taken else name

    def _replace(self, file_name: str, parts: Sequence[memoryview]) -> tuple[int, str]:
        """Write a file atomically; return its length and checksum."""
        digest, nbytes = xxhash.xxh3_64(), 0
        file = self._disk.create(file_name + _PART)
        try:
            for piece in _pieces(parts):
                digest.update(piece)
                file.write([piece])
                nbytes += len(piece)
            file.sync()
        finally:
            file.close()
        self._disk.rename(file_name + _PART, file_name)
        self._disk.sync_folder()
        return nbytes, digest.hexdigest()

    def _prune(self, fingerprint: str) -> None:
        """Remove the checkpoints beyond those to keep: manifests first, so that none stays half there."""
        usable = self._usable(fingerprint)
        if len(usable) > self._keep:
            oldest, best = _age(usable[self._keep - 1][0]), best_first(usable)[0][0]
            ours = [name for name, manifest in self._listing()[0] if manifest.fingerprint == fingerprint]
            beyond = [name for name in ours if _age(name) < oldest and name != best]
            for name in beyond:
                self._disk.remove(name + _MANIFEST)
            self._disk.sync_folder()
        self._sweep()

    def _sweep(self) -> None:
        """Remove what belongs to no checkpoint: temporary files, and arrays without a manifest."""
        whole = set(self._names(_MANIFEST))
        for kind in (_TENSORS + _PART, _MANIFEST + _PART):
            for name in self._names(kind):
                self._disk.remove(name + kind)
        for name in self._names(_TENSORS):
            if name not in whole:
                self._disk.remove(name + _TENSORS)

    def _manifest(self, name: str) -> Manifest:
        """Read and check a manifest; raises `StorageError`."""
        content = self._read(name + _MANIFEST)
        where = f"{name}{_MANIFEST}"
        version = check_json(content, _Format, where=where, remedy=_REMEDY).format
        if version != FORMAT:
            raise StorageError(
                f"{name}: is of checkpoint format {version}, and this edgeasync reads format {FORMAT}; "
                "start the version of edgeasync that wrote it, or choose another run folder"
            )
        manifest = check_json(content, Manifest, where=where, remedy=_REMEDY)
        unsealed = msgspec.structs.replace(manifest, seal="")
        # A damaged name of a field that has a default would pass for one that is not there.
        sound = manifest.seal == _seal(unsealed) and msgspec.json.encode(manifest) == content
        if not sound or (manifest.journal, manifest.version) != _age(name)[:2]:
            raise StorageError(f"{name}{_MANIFEST}: damaged (it is not what was written); {_REMEDY}")
        return manifest

    def _tensors(self, name: str, manifest: Manifest) -> Tensors:
        """Read and check a checkpoint's arrays; raises `StorageError`."""
        content = self._read(name + _TENSORS, manifest.nbytes + 1)
        if len(content) != manifest.nbytes:
            nbytes = len(content) if len(content) < manifest.nbytes else "more"
            raise StorageError(f"{name}{_TENSORS}: has {nbytes} bytes, not {manifest.nbytes}; {_REMEDY}")
        if f"{checksum(content):016x}" != manifest.checksum:
            raise StorageError(f"{name}{_TENSORS}: damaged (its checksum is not the manifest's); {_REMEDY}")
        try:
            return read_tensors(content)
        except ValueError as error:
            raise StorageError(f"{name}{_TENSORS}: is no safetensors file: {error}; {_REMEDY}") from error

    def _read(self, file_name: str, nbytes: int | None = None) -> Buffer:
        try:
            return self._disk.read(file_name, 0, nbytes)
        except OSError as error:
            raise StorageError(f"{file_name}: cannot be read: {error.strerror or error}; {_REMEDY}") from error


_REMEDY = "put it back from a backup, or recover from another checkpoint"


def _age(name: str) -> tuple[int, int, int]:
    """Return what orders checkpoints' names: journal number, version, and which of those with the same it is."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3] or 1)


def _evaluation(manifest: Manifest) -> tuple[float, float] | None:
    """Return what is higher the better a checkpoint is, or None if it was not evaluated."""
    loss, accuracy = manifest.loss, manifest.accuracy
    return None if loss is None and accuracy is None else goodness(loss, accuracy)


def best_first(newest_first: list[tuple[str, Manifest]]) -> list[tuple[str, Manifest]]:
    """Order checkpoints by their evaluation; those that have none come last, newest first."""
    never = (-np.inf, -np.inf)
    return sorted(newest_first, key=lambda known: _evaluation(known[1]) or never, reverse=True)


def _seal(unsealed: Manifest) -> str:
    return f"{checksum(msgspec.json.encode(unsealed)):016x}"


def _pieces(parts: Sequence[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]
