"""What reads bytes that somebody else may have written: each takes anything, or refuses it by an error of its own.

A target is a class with `inputs`, valid bytes to begin from, and `attempt`, which reads bytes and returns whether
they were taken. It raises the target's `refusals`, and nothing else.
"""

import base64
import contextlib
import hashlib
import ipaddress
import shutil
import socket
import struct
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.state_codec import FORMAT, decode_state
from edgeasync.core.engine.recorder import shown
from edgeasync.core.recovery.log import event_of, read_entry
from edgeasync.core.recovery.state import SCALARS, CoreState
from edgeasync.data.files import load
from edgeasync.durable.allow_list import Allowed, AllowList
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.history import FILE_HEADER, HISTORY_FILE, Row, blocks, count_rows, read_rows, scan
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.keys import HubKeys, KeyPair, Token
from edgeasync.durable.recovery import Rules, open_checkpoint
from edgeasync.errors import ConfigError, DataError, GraphError, ModelMismatchError, ProtocolError, StorageError
from edgeasync.graphs.split_base import split_base
from edgeasync.net.status import fetch_status
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, find_codec, make_codec
from edgeasync.protocol.messages import Hello, StatusRequest
from edgeasync.sdk.history import History
from edgeasync.training.graph_check import check_graph
from tests.fuzz.files import FILES
from tests.support.codecs.coded import flat
from tests.support.formats.write_formats import FOLDER, make_messages
from tests.support.models.graphs import forward_model
from tests.support.programs.processes import PATIENCE_S, Commands
from tests.support.security.keyed import Proxy, ask, client, start_hub

LISTEN_S = 0.005
"""How long a stranger waits for what the hub says to what he has said so far."""


class MemoryDisk:
    """Files that are read."""

    def __init__(self, files):
        self.files = files

    def names(self):
        return list(self.files)

    def size(self, name):
        return len(self.files[name])

    def read(self, name, offset=0, nbytes=None):
        return self.files[name][offset:][:nbytes]


class Target:
    """One reader; used in a `with`, for those that need a process or a folder."""

    refusals: tuple[type[Exception], ...] = ()
    inputs: list[bytes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self):
        """Raise `AssertionError` if something has gone wrong that no case has shown by itself."""


class Wire(Target):
    """A header frame."""

    refusals = (ProtocolError,)

    def __init__(self):
        self.inputs = [wire.encode(message) for message in make_messages()]

    def attempt(self, content):
        message = wire.decode(content)
        assert wire.decode(wire.encode(message)) == message or "nan" in repr(message)
        assert len(shown(message)) < 400
        return True


class Payload(Target):
    """An update, coded: the first byte says how."""

    refusals = (ProtocolError,)
    spec = flat(48)
    codecs = ("identity", "float16", "bfloat16", "int8", "int4", "sign", "top_k(0.2)", "int8+zstd")

    def __init__(self):
        values = np.random.default_rng(0).normal(size=self.spec.length).astype(np.float32)
        self.inputs = [
            bytes([number]) + bytes(make_codec(name, self.spec).encode(VectorSource(values)))
            for number, name in enumerate(self.codecs)
        ]
        self._model = HubModel(self.spec, np.zeros(self.spec.length, np.float32), 0, Policy())

    def attempt(self, content):
        number, payload = (content or b"\0")[0], content[1:]
        codec = find_codec(self.codecs[number % len(self.codecs)], len(payload), self.spec)
        self._model.norm(codec.open(payload))
        return True


class AllowLists(Target):
    """The allow-list, of which any text is read: a name that is revoked is out, whatever the text is."""

    def __init__(self):
        keys = [bytes([number]) * 32 for number in range(1, 5)]
        self._before = {f"pi-{number}": Allowed(f"pi-{number}", "device", key) for number, key in enumerate(keys)}
        lines = [f"pi-{number} device   {key.hex()}  # a board\n" for number, key in enumerate(keys)]
        self.inputs = [
            "".join(["# ours\n\n", *lines]).encode(),
            "".join(lines).replace("device", "revoked", 2).encode(),
            f"owner operator {keys[3].hex()}\r\npi-1 king\n".encode(),
        ]

    def attempt(self, content):
        listed = AllowList(content.decode(errors="surrogateescape"))
        let_in = listed.lets_in(self._before)
        if listed.unreadable:
            assert listed.trouble
            assert set(let_in.items()) <= set(self._before.items()), "who is new waits"
        for name in self._before:
            with contextlib.suppress(StorageError):
                listed = listed.revoking(name)
            assert name not in listed.lets_in(self._before)
        return True


class Tokens(Target):
    """A token: as text, and its content with a checksum that fits."""

    refusals = (ConfigError,)

    def __init__(self):
        token = Token(b"s" * 32, b"h" * 32, "pi-1", ("tcp://hub.example:5555", "tcp://10.0.0.1:5555"))
        self.inputs = [token.text().encode(), msgspec.msgpack.encode(token)]

    def attempt(self, content):
        sealed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()[:4] + content).decode().rstrip("=")
        taken = 0
        for text in (content.decode("latin-1"), "edgeasync1_" + sealed):
            with contextlib.suppress(ConfigError):
                taken += bool(Token.read(text).text())
        return taken > 0


class Journal(Target):
    """A file of the journal."""

    refusals = (StorageError,)

    def __init__(self):
        self.inputs = [path.read_bytes() for path in sorted(FOLDER.glob("run/journal-*"))]

    def attempt(self, content):
        for record in JournalReading(MemoryDisk({"journal-00000001": content})).records():
            event_of(read_entry(record.entry))
        return True


class HistoryFiles(Target):
    """A run's history: any bytes give some rows, and a reason why there may be more."""

    def __init__(self):
        self.inputs = [path.read_bytes() for path in sorted(FOLDER.glob(f"run/{HISTORY_FILE}"))]

    def attempt(self, content):
        rows = read_rows(MemoryDisk({HISTORY_FILE: content}))
        assert len(History(rows)) == len(rows.updates)
        return not rows.trouble


class HistoryBlocks(HistoryFiles):
    """The body of a block of a history, inflated, whose checksum fits."""

    def __init__(self):
        super().__init__()
        content = self.inputs[0]
        self.inputs = [msgspec.msgpack.encode(rows) for rows in blocks(content, scan(content).places[:1])]

    def attempt(self, content):
        body, count = zlib.compress(content), 1
        with contextlib.suppress(ValueError):
            count = count_rows(msgspec.msgpack.decode(content, type=list[Row]))
        header = struct.pack("<4sIIQ", b"EAHB", len(body), count, 0)
        block = header + wire.checksum(header, body).to_bytes(8, "little") + body
        return super().attempt(FILE_HEADER + block)


class Entries(Target):
    """An entry of the journal, whose checksum fits."""

    refusals = (StorageError,)

    def __init__(self):
        self.inputs = []
        for path in sorted(FOLDER.glob("run/journal-*")):
            records = JournalReading(MemoryDisk({path.name: path.read_bytes()})).records()
            self.inputs += [bytes(record.entry) for record in records]

    def attempt(self, content):
        event_of(read_entry(content))
        return True


class Checkpoint(Target):
    """A checkpoint's manifest, as it is and with a seal that fits; with the arrays it says."""

    refusals = (StorageError, ModelMismatchError)

    def __init__(self):
        self._checkpoints = [
            (path.read_bytes(), path.with_suffix(".safetensors").read_bytes(), path.stem)
            for path in sorted(FOLDER.glob("run/checkpoint-*.json"))[-1:]
        ]
        self.inputs = [manifest for manifest, _, _ in self._checkpoints]
        self._fingerprint = msgspec.json.decode(self.inputs[0])["fingerprint"]

    def attempt(self, content):
        _, tensors, name = self._checkpoints[len(content) % len(self._checkpoints)]
        return self._open(content, tensors, name) or self._open(_sealed(content, tensors), tensors, name)

    def _open(self, manifest, tensors, name):
        store = CheckpointStore(MemoryDisk({f"{name}.json": manifest, f"{name}.safetensors": tensors}), 2)
        with contextlib.suppress(*self.refusals):
            chosen = store.choose("latest", self._fingerprint)
            open_checkpoint(chosen, Rules.make_core, lambda: bytes(16)).core.check()
            return True
        return False


class CheckpointArrays(Checkpoint):
    """A checkpoint's arrays, with a manifest that fits."""

    def __init__(self):
        super().__init__()
        self.inputs = [tensors for _, tensors, _ in self._checkpoints]

    def attempt(self, content):
        manifest, _, name = self._checkpoints[len(content) % len(self._checkpoints)]
        return self._open(_sealed(manifest, content), content, name)


def _sealed(manifest, tensors):
    """Return a manifest with the checksums that it should have; as it is if it is none."""
    try:
        found = msgspec.json.decode(manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return manifest
    digest = f"{wire.checksum(tensors):016x}"
    found = msgspec.structs.replace(found, nbytes=len(tensors), checksum=digest, seal="")
    return msgspec.json.encode(
        msgspec.structs.replace(found, seal=f"{wire.checksum(msgspec.json.encode(found)):016x}")
    )


class State(Target):
    """The core's state in a checkpoint, whose checksum fits."""

    refusals = (StorageError,)

    def __init__(self):
        self.inputs = []
        for path in sorted(FOLDER.glob("run/checkpoint-*.safetensors")):
            scalars = safetensors.numpy.load_file(path)[SCALARS].tobytes()
            core = msgspec.msgpack.decode(scalars[10:])["core"]
            self.inputs.append(core[10:])

    def attempt(self, content):
        sealed = FORMAT.to_bytes(2, "big") + wire.checksum(content).to_bytes(8, "big") + content
        decode_state(sealed, CoreState)
        return True


class Graph(Target):
    """A training graph that a hub ships, as a device screens it."""

    refusals = (GraphError,)

    def __init__(self):
        self.inputs = [build_training_graph(forward_model(), GraphSettings()).model, forward_model()]

    def attempt(self, content):
        check_graph(content, bytes_max=1 << 20)
        return True


class GraphWithBase(Target):
    """A training graph whose large constants are in a base."""

    refusals = (GraphError,)

    def __init__(self):
        layers = nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 520), nn.ReLU(), nn.Linear(520, 2)
        forward = nn.to_onnx(nn.Sequential(*layers), (4,)).SerializeToString()
        built = build_training_graph(forward, GraphSettings(train=("4.*",)))
        with tempfile.TemporaryDirectory() as folder:
            graph, self._base = split_base(built.model, Path(folder))
        self.inputs = [bytes(graph)]

    def attempt(self, content):
        check_graph(content, bytes_max=1 << 20, base=self._base)
        return True


class ForwardModel(Target):
    """A forward model, of which a hub makes a training graph."""

    refusals = (GraphError,)

    def __init__(self):
        self.inputs = [forward_model()]

    def attempt(self, content):
        build_training_graph(content, GraphSettings())
        return True


class Npz(Target):
    """A device's data."""

    refusals = (DataError,)

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp())
        self._path = self._folder / "data.npz"
        self.inputs = []
        x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)
        for save in (np.savez, np.savez_compressed):
            save(self._path, x=x, y=y)
            self.inputs.append(self._path.read_bytes())
        return self

    def __exit__(self, *_):
        shutil.rmtree(self._folder)

    def attempt(self, content):
        self._path.write_bytes(content)
        load(self._path)
        return True


class Handshake(Target):
    """What a stranger says to a live hub with keys, over a raw socket; the hub closes it when he has said all."""

    refusals = (OSError,)
    ends = (64, 64 + 202)
    """Where the greeting and the `HELLO` end."""

    def __enter__(self):
        self._folder = tempfile.mkdtemp()
        self._commands = Commands(self._folder)
        self.hub, self.address = self._start()
        self._attempts = 0
        self.port = int(self.address.rpartition(":")[2])
        self.inputs = self._record()
        return self

    def __exit__(self, *_):
        self._commands.__exit__()
        shutil.rmtree(self._folder)

    def _start(self):
        self._keys = HubKeys.init(Path(self._folder) / "keys")
        self._pair = KeyPair.make()
        self._keys.allow("pi-1", "device", self._pair.public)
        return start_hub(self._commands, self._keys)

    def _record(self):
        hub = self._keys.pair().public
        with Proxy(self.port) as proxy, client(proxy.address, self._pair, hub) as device:
            device.join("pi-1")
        return [bytes(proxy.recorded)]

    def attempt(self, content):
        assert not self.hub.ended, f"one of the last cases ended the hub: {self.hub}"
        self._attempts += 1  # from an address of its own: one that fails often is held off for a while
        source = str(ipaddress.ip_address("127.1.0.0") + self._attempts)
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (source, 0)) as stranger:
            stranger.settimeout(LISTEN_S)
            for start, end in pairwise((0, *self.ends, len(content))):
                stranger.sendall(content[start:end])  # libzmq drops who says more before it has answered
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1 << 16):
                        return False
            stranger.settimeout(PATIENCE_S)
            stranger.shutdown(socket.SHUT_WR)
            try:
                while stranger.recv(1 << 16):
                    pass
            except TimeoutError as error:
                raise AssertionError("the hub does not close the connection") from error
        return True

    def check(self):
        """The hub lives, and answers its operator."""
        assert ask(self.address, self._keys)["pid"] == self.hub.pid


class PlainHandshake(Handshake):
    """The same at a hub without keys, where what follows the handshake is read, too."""

    ends = (64,)
    _starts = 0

    def _start(self):
        self._starts += 1
        return self._commands.hub(self._commands.settings(name=f"hub-{self._starts}"))

    def attempt(self, content):
        self._pass_over_known_defect()
        return super().attempt(content)

    def _pass_over_known_defect(self):
        """Start the hub again if an assertion of libzmq has ended it that SECURITY.md tells of."""
        if self.hub.ended and "Assertion failed: !_io_error" in str(self.hub):
            self.hub, self.address = self._start()
            self.port = int(self.address.rpartition(":")[2])

    def _record(self):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = _command(b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
        said = [wire.encode(Hello("pi-1", b"s" * 16, 1)), wire.encode(StatusRequest())]
        frames = b"".join(_frame(0, header) for header in said) + _frame(1, said[1]) + _frame(2, said[0])
        return [greeting + ready + frames, greeting + ready + frames + _command(b"\x04PING\0\0") + frames]

    def check(self):
        self._pass_over_known_defect()
        """The hub lives, and answers anybody."""
        assert fetch_status(self.address, PATIENCE_S)["pid"] == self.hub.pid


def _property(name, value):
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _frame(flags, body):
    length = len(body).to_bytes(8 if flags & 2 else 1, "big")
    return bytes([flags]) + length + body


def _command(body):
    return _frame(4, body)


TARGETS = {
    "wire": Wire,
    "payload": Payload,
    "allow-list": AllowLists,
    "token": Tokens,
    "journal": Journal,
    "history": HistoryFiles,
    "history-block": HistoryBlocks,
    "entry": Entries,
    "checkpoint": Checkpoint,
    "checkpoint-arrays": CheckpointArrays,
    "state": State,
    "graph": Graph,
    "graph_with_base": GraphWithBase,
    "model": ForwardModel,
    "npz": Npz,
    "handshake": Handshake,
    "plain-handshake": PlainHandshake,
    **FILES,
}
