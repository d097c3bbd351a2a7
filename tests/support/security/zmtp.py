"""ZMTP by hand, with CURVE or without: what libzmq would never send, and where it would never stop.

The cryptography is that of the libsodium that pyzmq brings along.
"""

import ctypes
import secrets
import socket
import struct
from pathlib import Path

import zmq

from tests.support.programs.processes import PATIENCE_S

SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\0"


def port_of(address):
    return int(address.rpartition(":")[2])


def greeting(mechanism):
    return SIGNATURE + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body, *, more=False, command=False):
    """Return a frame of ZMTP 3."""
    flags = more | (command << 2)
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + struct.pack(">Q", len(body)) + body


def properties(**values):
    return b"".join(
        bytes((len(name),)) + name.replace("_", "-").encode() + struct.pack(">I", len(value)) + value
        for name, value in values.items()
    )


def hello_of(hub, public=None, secret=None):
    """Return the first command of CURVE's handshake, under a pair for this connection alone."""
    if secret is None:
        public, secret = sodium().keypair()
    nonce = struct.pack(">Q", 1)
    box = sodium().box(bytes(64), b"CurveZMQHELLO---" + nonce, hub, secret)
    return frame(b"\x05HELLO\x01\0" + bytes(72) + public + nonce + box, command=True)


def tcp(address, source=None):
    """Open a connection, from an address of this machine if one is given."""
    return socket.create_connection(
        ("127.0.0.1", port_of(address)), PATIENCE_S, source_address=source and (source, 0)
    )


class Peer:
    """A DEALER's end of a connection, its handshake done."""

    def __init__(self, address, pair=None, hub=None, source=None):
        self.tcp = tcp(address, source)
        self._pair, self._hub = pair, hub
        self._key = None
        self._nonce = 0
        self.tcp.sendall(greeting(b"NULL" if pair is None else b"CURVE"))
        assert len(self._read(64)) == 64
        metadata = properties(Socket_Type=b"DEALER")
        if pair is None:
            self.tcp.sendall(frame(b"\x05READY" + metadata, command=True))
            self._read_frame()
        else:
            self._shake_hands(metadata)

    def _shake_hands(self, metadata):
        public, secret = sodium().keypair()
        box = sodium().box(bytes(64), b"CurveZMQHELLO---" + self._count(), self._hub, secret)
        self.tcp.sendall(frame(b"\x05HELLO\x01\0" + bytes(72) + public + self._short() + box, command=True))
        welcome = self._read_frame()
        assert welcome.startswith(b"\x07WELCOME"), welcome[:9]
        opened = sodium().open(welcome[24:], b"WELCOME-" + welcome[8:24], self._hub, secret)
        server, cookie = opened[:32], opened[32:]
        nonce = secrets.token_bytes(16)
        vouch = sodium().box(public + self._hub, b"VOUCH---" + nonce, server, self._pair.secret)
        self._key = sodium().shared(server, secret)
        said = self._pair.public + nonce + vouch + metadata
        box = sodium().seal(said, b"CurveZMQINITIATE" + self._count(), self._key)
        self.tcp.sendall(frame(b"\x08INITIATE" + cookie + self._short() + box, command=True))
        assert self._read_frame().startswith(b"\x05READY")

    def _count(self):
        self._nonce += 1
        return self._short()

    def _short(self):
        return struct.pack(">Q", self._nonce)

    def frame(self, body, *, more=False):
        """Return a frame of a message, encrypted if there are keys."""
        if self._key is None:
            return frame(body, more=more)
        box = sodium().seal(bytes((more,)) + body, b"CurveZMQMESSAGEC" + self._count(), self._key)
        return frame(b"\x07MESSAGE" + self._short() + box)

    def _read(self, count):
        read = b""
        while len(read) < count:
            more = self.tcp.recv(count - len(read))
            if not more:
                raise ConnectionError("the hub has closed the connection")
            read += more
        return read

    def _read_frame(self):
        (flags,) = self._read(1)
        length = struct.unpack(">Q", self._read(8))[0] if flags & 2 else self._read(1)[0]
        return self._read(length)

    def close(self):
        self.tcp.close()


class Sodium:
    """The few functions of libsodium that CURVE is made of."""

    def __init__(self):
        here = Path(zmq.__file__).parent
        (library,) = [*here.parent.glob("pyzmq.libs/libsodium*")][:1] or ["libsodium.so.23"]
        self._library = ctypes.CDLL(str(library))

    def _call(self, name, *arguments):
        assert getattr(self._library, name)(*arguments) == 0, name

    def keypair(self):
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        self._call("crypto_box_keypair", public, secret)
        return public.raw, secret.raw

    def shared(self, public, secret):
        key = ctypes.create_string_buffer(32)
        self._call("crypto_box_beforenm", key, public, secret)
        return key.raw

    def seal(self, message, nonce, key):
        box = ctypes.create_string_buffer(len(message) + 16)
        self._call("crypto_box_easy_afternm", box, message, ctypes.c_ulonglong(len(message)), nonce, key)
        return box.raw

    def box(self, message, nonce, public, secret):
        return self.seal(message, nonce, self.shared(public, secret))

    def open(self, box, nonce, public, secret):
        message = ctypes.create_string_buffer(len(box) - 16)
        key = self.shared(public, secret)
        self._call("crypto_box_open_easy_afternm", message, box, ctypes.c_ulonglong(len(box)), nonce, key)
        return message.raw


_sodium = []


def sodium():
    """Return libsodium, loaded once."""
    if not _sodium:
        _sodium.append(Sodium())
    return _sodium[0]
