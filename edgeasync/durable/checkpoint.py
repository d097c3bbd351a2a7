"""Write and read checkpoints of a run. Each consists of a safetensors file and a manifest.

Both files are written under a temporary name, synced and renamed. The manifest is renamed last, so
a checkpoint with a manifest is complete. A checkpoint's name is `checkpoint-<journal
number>-<version>`. The checkpoint with the higher journal number is the newer one, regardless of
the clock. If a name with the same two numbers already exists, the suffix `-2`, `-3` and so on is
appended.
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
"""The only supported format. Increase it when the structure of the manifest or of the recorded
rules changes.
"""

PIECE_BYTES = 1 << 20
"""Number of bytes that are checksummed and then written together, so that they stay in the CPU
cache.
"""

Tensors = Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.uint8]]

_NAME = re.compile(r"checkpoint-([0-9]{10,})-([0-9]+)(?:-([0-9]+))?")
_TENSORS = ".safetensors"
_MANIFEST = ".json"
_PART = ".part"

_Digest = Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
_Count = Annotated[int, Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a checkpoint. The store sets `nbytes` and the checksums when it writes it.

    `journal` is the number of the last journal record that the checkpoint covers. `now_s` is the
    time of the core's clock, and `created_s` is wall-clock time. `rules` contains the spec, the
    policy and the settings, which determine how the state evolves. `checksum` is the XXH3-64 of the
    safetensors file. `seal` is the XXH3-64 of the manifest with an empty `seal`.
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
    """The checkpoint to recover from.

    `skipped` explains why the checkpoints that were preferred to this one (newer or better
    evaluated) were not used.
    """

    name: str
    manifest: Manifest
    tensors: Tensors
    skipped: list[str]


class _Format(msgspec.Struct):
    format: int


class CheckpointStore:
    """The checkpoints of a run on a disk: the newest `keep`, and the one with the best evaluation.

    Damaged checkpoints do not count towards `keep`. Checkpoints of another model are neither used
    nor removed. Use the store from one thread at a time.
    """

    def __init__(self, disk: Disk, keep: int) -> None:
        assert keep >= 1
        self._disk = disk
        self._keep = keep
        self._damaged: set[str] = set()

    def write(self, manifest: Manifest, tensors: Tensors) -> str:
        """Write a checkpoint, remove old ones, and return the name of the new checkpoint.

        The arrays are read twice without a lock, so no thread may change them during the call.
        Raises `OSError` if the disk fails. In that case, existing checkpoints are still complete,
        and the new one is either complete or missing. Raises `ValueError` for an array that is
        neither float32 nor uint8.
        """
        parts = tensor_parts(tensors)
        manifest = msgspec.json.decode(
            msgspec.json.encode(manifest), type=resolve_type(Manifest)
        )  # so that it equals what a reader decodes
        name = self._free_name(manifest)
        try:
            nbytes, digest = self._replace(name + _TENSORS, parts)
            manifest = msgspec.structs.replace(manifest, format=FORMAT, nbytes=nbytes, checksum=digest, seal="")
            sealed = msgspec.structs.replace(manifest, seal=_seal(manifest))
            self._replace(name + _MANIFEST, [memoryview(msgspec.json.encode(sealed))])
        except OSError:
            with contextlib.suppress(OSError):  # free the space of the partial file
                self._sweep()
            raise
        self._prune(manifest.fingerprint)
        return name

    def manifests(self) -> tuple[list[tuple[str, Manifest]], list[tuple[str, str]]]:
        """Return readable checkpoints and unreadable ones, newest first.

        The first list contains names and manifests, and the second contains names and errors. The
        arrays are not read. Raises `StorageError` if the folder cannot be read.
        """
        try:
            return self._listing()
        except OSError as error:
            raise StorageError(
                f"the checkpoints cannot be read: {error}; check the permissions of the folder"
            ) from error

    def load(self, name: str, fingerprint: str) -> tuple[Manifest, Tensors]:
        """Read and verify a checkpoint. The arrays are read-only views of the file's content.

        Raises `StorageError` if the checkpoint is damaged or has another format. Raises
        `ModelMismatchError` if its model does not have this fingerprint.
        """
        manifest = self._manifest(name)
        if manifest.fingerprint != fingerprint:
            raise ModelMismatchError(
                f"{name}: belongs to another model ({manifest.fingerprint}, not {fingerprint}); "
                "use the run's original model and the same parameters to train, or choose another run folder"
            )
        try:
            tensors = self._tensors(name, manifest)
        except StorageError:
            self._damaged.add(name)
            raise
        return manifest, tensors

    def choose(self, recovery: str, fingerprint: str) -> ChosenCheckpoint | None:
        """Load the checkpoint to recover from, or return `None` if there are no checkpoints.

        `recovery` is "latest", "best" or the name of a checkpoint. The best checkpoint has the
        highest accuracy or, if accuracy was not measured, the lowest loss. If no version was
        evaluated, the latest checkpoint counts as the best. Raises `StorageError` or
        `ModelMismatchError` if the named checkpoint, or every checkpoint, is unusable.
        """
        readable, unreadable = self.manifests()
        if recovery not in {"latest", "best"}:
            known = [name for name, _ in readable] + [name for name, _ in unreadable]
            if recovery not in known:
                there = ", ".join(known) or "none"
                raise StorageError(f'{recovery}: no such checkpoint; choose "latest", "best" or one of: {there}')
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
                        f"{name}: no usable checkpoint was evaluated, so the latest is used instead of the best"
                    )
                return ChosenCheckpoint(name, manifest, tensors, skipped)
        if not skipped:
            return None
        if only_mismatches:
            raise ModelMismatchError(skipped[0])  # the same holds for all of them
        raise StorageError(f"no checkpoint can be used: {' | '.join(skipped)}")

    def covered(self, fingerprint: str) -> int:
        """Return the number up to which journal records are no longer needed.

        This is the last record that the second-newest checkpoint covers. If the newest checkpoint
        turns out to be damaged, the exact state can still be recovered from the second-newest one
        and the journal. If `keep` is 1, this is the last record that the only checkpoint covers.
        Raises `OSError`.
        """
        spare = min(self._keep, 2) - 1
        usable = self._usable(fingerprint)
        return usable[spare][1].journal if len(usable) > spare else 0

    def _listing(self) -> tuple[list[tuple[str, Manifest]], list[tuple[str, str]]]:
        """Return what `manifests` returns, but raise `OSError` if the folder cannot be read."""
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
        """Return the names of checkpoints that have a file with this suffix, newest first."""
        files = (name for name in self._disk.names() if name.endswith(suffix))
        return sorted(
            filter(_NAME.fullmatch, (file.removesuffix(suffix) for file in files)), key=_age, reverse=True
        )

    def _free_name(self, manifest: Manifest) -> str:
        """Return an unused name for a checkpoint.

        If one file of an existing checkpoint were replaced, both checkpoints would be invalid.
        """
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
        """Remove old checkpoints.

        Their manifests are removed first, so no partial checkpoint looks complete.
        """
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
        """Remove temporary files, and arrays that have no manifest."""
        whole = set(self._names(_MANIFEST))
        for kind in (_TENSORS + _PART, _MANIFEST + _PART):
            for name in self._names(kind):
                self._disk.remove(name + kind)
        for name in self._names(_TENSORS):
            if name not in whole:
                self._disk.remove(name + _TENSORS)

    def _manifest(self, name: str) -> Manifest:
        """Read and verify a manifest; raises `StorageError`."""
        content = self._read(name + _MANIFEST)
        where = f"{name}{_MANIFEST}"
        version = check_json(content, _Format, where=where, remedy=_REMEDY).format
        if version != FORMAT:
            raise StorageError(
                f"{name}: has checkpoint format {version}, but this edgeasync reads format {FORMAT}; "
                "use the version of edgeasync that wrote it, or choose another run folder"
            )
        manifest = check_json(content, Manifest, where=where, remedy=_REMEDY)
        unsealed = msgspec.structs.replace(manifest, seal="")
        # If the name of a field with a default is damaged, the field looks absent.
        sound = manifest.seal == _seal(unsealed) and msgspec.json.encode(manifest) == content
        if not sound or (manifest.journal, manifest.version) != _age(name)[:2]:
            raise StorageError(f"{name}{_MANIFEST}: damaged (its content was changed); {_REMEDY}")
        return manifest

    def _tensors(self, name: str, manifest: Manifest) -> Tensors:
        """Read and verify a checkpoint's arrays; raises `StorageError`."""
        content = self._read(name + _TENSORS, manifest.nbytes + 1)
        if len(content) != manifest.nbytes:
            nbytes = len(content) if len(content) < manifest.nbytes else "more"
            raise StorageError(f"{name}{_TENSORS}: has {nbytes} bytes, expected {manifest.nbytes}; {_REMEDY}")
        if f"{checksum(content):016x}" != manifest.checksum:
            raise StorageError(f"{name}{_TENSORS}: damaged (its checksum differs from the manifest's); {_REMEDY}")
        try:
            return read_tensors(content)
        except ValueError as error:
            raise StorageError(f"{name}{_TENSORS}: not a safetensors file: {error}; {_REMEDY}") from error

    def _read(self, file_name: str, nbytes: int | None = None) -> Buffer:
        try:
            return self._disk.read(file_name, 0, nbytes)
        except OSError as error:
            raise StorageError(f"{file_name}: cannot be read: {error.strerror or error}; {_REMEDY}") from error


_REMEDY = "restore it from a backup, or recover from another checkpoint"


def _age(name: str) -> tuple[int, int, int]:
    """Return the sort key of a checkpoint's name: journal number, version and suffix."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3] or 1)


def _evaluation(manifest: Manifest) -> tuple[float, float] | None:
    """Return the score of a checkpoint, or `None` if it was not evaluated. Higher is better."""
    loss, accuracy = manifest.loss, manifest.accuracy
    return None if loss is None and accuracy is None else goodness(loss, accuracy)


def best_first(newest_first: list[tuple[str, Manifest]]) -> list[tuple[str, Manifest]]:
    """Sort checkpoints by their evaluation, best first.

    Checkpoints without an evaluation are last and ordered newest first.
    """
    never = (-np.inf, -np.inf)
    return sorted(newest_first, key=lambda known: _evaluation(known[1]) or never, reverse=True)


def _seal(unsealed: Manifest) -> str:
    return f"{checksum(msgspec.json.encode(unsealed)):016x}"


def _pieces(parts: Sequence[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]
