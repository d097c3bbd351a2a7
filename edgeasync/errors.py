"""Every error edgeasync raises on purpose, and the exit code the command line gives it.

    EdgeAsyncError                1
    ├── ConfigError               2   a setting, flag or file of settings is wrong
    │   └── PluginError           2   code of somebody else's is missing, or does not do what it must
    ├── DataError                 3   a device's local data cannot be used
    ├── ProtocolError             4   a peer sent what the protocol does not allow
    ├── ModelMismatchError        5   two sides speak of different models
    ├── HubUnreachableError       6   nobody answers at the hub's address
    ├── RefusedError              7   the hub refused this device for good
    ├── AddressError              8   an address cannot be bound or understood
    ├── StorageError              9   a file of a run or a device's state cannot be read or written
    ├── GraphError               10   an ONNX graph cannot be trained, or is not one to trust
    ├── AccessError              11   keys do not fit: the hub does not know this one, or is not the one meant
    ├── CapacityError            12   this machine has less memory or fewer files than the hub may need
    ├── UnfitError               13   `edgeasync doctor` found what keeps this device from training
    ├── NoMemoryError            14   this device has not the memory for a local step
    └── TransitionError           1   a state machine was about to make a move that it does not have: a defect

The codes are a contract: scripts rely on them. Each message says what was wrong, where, and what to do.
"""

import ast
import re
from typing import Any, ClassVar

_QUOTED = r"""(?:'[^']*'|"[^"]*")"""
_ARGUMENT = re.compile(rf"\b(output|loss|train|freeze)=({_QUOTED}|\[{_QUOTED}(?:, {_QUOTED})*\])")


def argument(name: str, *values: str) -> str:
    """Return what to give for a model, in a message, as Python has it: `with_flags` makes the command's of that.

    >>> argument("output", "scores"), argument("train", "head.*")
    ("output='scores'", "train=['head.*']")
    """
    quoted = ", ".join(map(repr, values))
    return f"{name}={quoted}" if name in ("output", "loss") else f"{name}=[{quoted}]"


def with_flags(sentence: str) -> str:
    """Return a message in which the arguments are flags.

    >>> with_flags("give train=['head.*', 'neck.*']")
    "give --train 'head.*' --train 'neck.*'"
    """

    def flags(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1]} {value}" for value in re.findall(_QUOTED, found[2])])

    return _ARGUMENT.sub(flags, sentence)


def arguments(sentence: str) -> dict[str, Any]:
    """Return the arguments that a message says to give: of each name the last value, or all patterns.

    >>> arguments("give output='scores' and loss='mse', or freeze=['a', 'b']")
    {'output': 'scores', 'loss': 'mse', 'freeze': ('a', 'b')}
    """
    found: dict[str, Any] = {}
    for name, given in _ARGUMENT.findall(sentence):
        value = ast.literal_eval(given)
        found[name] = (*found.get(name, ()), *value) if isinstance(value, list) else value
    return found


_NATIVE = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : | ?==> Context: .*|Load model from \S* failed: ?|Status Message: "
    r"|(?<!\S)\S+\.(?:h|hpp|c|cc|cpp|cu):\d+:? ?"
    r"(?:.* was false\. ?|(?:\w+: )?Assertion .* failed: ?|[A-Z][a-z]\w+[A-Z]\w+(?= ) ?)?"
    r"|\b[A-Z]\w+::(?=[A-Z])"
)
"""What libraries in C++ write besides the reason: codes, source lines, functions, scopes and assertions."""

_RUNNING = re.compile(
    r"(?:Exception|Non-zero status code returned while) running (\w+) node\. Name:'([^']*)' ?(.*)"
)
_INVALID = re.compile(r"This is an invalid model\. (?:Error: )?In Node, \(\"([^\"]*)\", (\w+),.*, Error:? (.*)")

_INFERRED = re.compile(r"Node ?\(([^)]*)\) Op ?\((\w+)\) \[\w+\] (.*)")

_REASON_MAX = 300
_LOOKED_AT_MAX = 4000
"""What follows may be names out of a file, of any length."""


def native_reason(error: BaseException) -> str:
    """Return the reason in an error of onnx or onnxruntime as one line of ours, without what only C++ knows."""
    said = _NATIVE.sub("", " ".join(str(error)[:_LOOKED_AT_MAX].split())).strip(" :.")
    if found := _RUNNING.search(said):
        said = f"{_node(found[2], found[1])} fails: {found[3]}"
    elif found := _INVALID.search(said) or _INFERRED.search(said):
        said = f"{_node(found[1], found[2])} is wrong: {found[3]}"
    return said.strip(" :.")[:_REASON_MAX] or type(error).__name__


def _node(name: str, operator: str) -> str:
    return f"node {name!r} ({operator})" if name else f"a node ({operator})"


class EdgeAsyncError(Exception):
    """Root of the error tree. Every error that edgeasync raises on purpose is one of these.

    >>> from edgeasync import EdgeAsyncError, Run
    >>> try:
    ...     Run.open("/nothing")
    ... except EdgeAsyncError as error:
    ...     print(error)
    /nothing: no such folder; give the folder of a hub's run
    """

    exit_code: ClassVar[int] = 1


class ConfigError(EdgeAsyncError):
    """A setting, flag or file of settings is wrong."""

    exit_code = 2


class PluginError(ConfigError):
    """Code of somebody else's, a plugin, is missing here, or does not do what it must."""


class DataError(EdgeAsyncError):
    """A device's local data cannot be used."""

    exit_code = 3


class ProtocolError(EdgeAsyncError):
    """A peer sent what the protocol does not allow."""

    exit_code = 4


class ModelMismatchError(EdgeAsyncError):
    """Two sides speak of different models."""

    exit_code = 5


class HubUnreachableError(EdgeAsyncError):
    """Nobody answers at the hub's address."""

    exit_code = 6


class RefusedError(EdgeAsyncError):
    """The hub refused this device for good."""

    exit_code = 7


class AddressError(EdgeAsyncError):
    """An address cannot be bound or understood."""

    exit_code = 8


class StorageError(EdgeAsyncError):
    """A file of a run or of a device's state cannot be read or written."""

    exit_code = 9


class GraphError(EdgeAsyncError):
    """An ONNX graph cannot be trained, or is not one to trust."""

    exit_code = 10


class AccessError(EdgeAsyncError):
    """Keys do not fit: the hub does not know this one, or is not the one that was meant."""

    exit_code = 11


class CapacityError(EdgeAsyncError):
    """This machine has less memory, or allows fewer files, than the hub may need."""

    exit_code = 12


class UnfitError(EdgeAsyncError):
    """`edgeasync doctor` found something that keeps this device from training."""

    exit_code = 13


class NoMemoryError(EdgeAsyncError):
    """This device has not the memory for a local step."""

    exit_code = 14


class TransitionError(EdgeAsyncError):
    """A state machine was about to make a move that its table does not have: a defect of edgeasync."""
