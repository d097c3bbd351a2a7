"""What a device keeps on disk: it comes back as it was, or is put aside, whatever happened to the file."""

import msgspec
import numpy as np
import pytest

from edgeasync.core.arrays.spool import Spool
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.durable import spool_file
from edgeasync.durable.spool_file import SpoolFile
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import ModelVersion, Push

STATE_ID = "5" * 32
PAYLOAD = bytes(range(40))
PUSH = Push(
    bytes(16), 7, ModelVersion("0" * 16, 3), 8, 64, float("nan"), float("inf"), 0.125, "int8",
    wire.checksum(PAYLOAD), len(PAYLOAD), overlap_steps=2,
)  # fmt: skip
RESIDUAL = np.array([0.5, np.nan, -3.0], np.float32)
TRAINER = {"count": np.array([5]), "optimizer.0": np.ones(3, np.float32), "batches": np.arange(4, dtype=np.uint64)}
SPOOL = Spool(ModelKey("a" * 32, "b" * 64, "delta"), PUSH, PAYLOAD, RESIDUAL, TRAINER)


def same(left, right):
    """Return whether two spools are alike to the bit."""
    assert left.trainer.keys() == right.trainer.keys()
    arrays = [(left.trainer[name], right.trainer[name]) for name in left.trainer]
    if left.residual is not None:
        arrays.append((left.residual, right.residual))
    return (
        (left.model, bytes(left.payload), left.residual is None, wire.encode(left.push))
        == (right.model, bytes(right.payload), right.residual is None, wire.encode(right.push))
        and all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in arrays)
    )  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return SpoolFile(tmp_path, STATE_ID)


@pytest.mark.parametrize(
    "spool",
    [SPOOL, Spool(ModelKey("a" * 32, None, "model"), PUSH, memoryview(PAYLOAD), None)],
    ids=["all", "least"],
)
def test_what_is_kept_comes_back(file, spool):
    assert file.read() is None
    file.write(SPOOL)
    file.write(spool)
    assert same(SpoolFile(file.path.parent, STATE_ID).read(), spool)
    assert [path.name for path in file.path.parent.iterdir()] == ["spool.safetensors"]


def test_damage_at_any_byte_puts_aside_or_does_no_harm(file):
    file.write(SPOOL)
    sound = file.path.read_bytes()
    harmless = 0
    for place in range(len(sound)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(sound)
            damaged[place] ^= change
            file.path.write_bytes(damaged)
            try:
                harmless += same(file.read(), SPOOL)
            except ProtocolError:
                continue
    assert harmless < 30, "blanks that fill up the header"


def test_what_is_not_this_devices_is_refused(file, tmp_path, monkeypatch):
    file.write(SPOOL)
    with pytest.raises(ProtocolError, match="written by another device"):
        SpoolFile(tmp_path, "6" * 32).read()
    monkeypatch.setattr(spool_file, "SPOOL_FORMAT", "edgeasync-spool-2")
    with pytest.raises(ProtocolError, match="another version of edgeasync"):
        SpoolFile(tmp_path, STATE_ID).read()


def test_an_update_in_a_codec_that_is_not_known_is_refused(file):
    push = msgspec.structs.replace(PUSH, codec="int1")
    file.write(Spool(SPOOL.model, push, PAYLOAD, None))
    with pytest.raises(ProtocolError, match="int1"):
        file.read()


def test_what_is_put_aside_makes_way(file):
    file.write(SPOOL)
    for _ in range(2):
        aside = file.put_aside()
        assert aside.name == "spool.safetensors.damaged"
        assert aside.exists()
        assert file.read() is None
        file.write(SPOOL)


def test_a_folder_that_is_gone_or_in_the_way_is_told(file, tmp_path):
    with pytest.raises(StorageError, match="cannot be renamed"):
        file.put_aside()
    file.path.mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        file.read()
    (tmp_path / "spool.safetensors" / "thing").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        file.write(SPOOL)
