"""The errors that edgeasync raises on purpose, and the exit code of the command line for each.

    EdgeAsyncError                1
    ├── ConfigError               2   a setting, flag or settings file is wrong
    │   └── PluginError           2   a plugin is missing or misbehaves
    ├── DataError                 3   a device's local data cannot be used
    ├── ProtocolError             4   a peer violated the wire protocol
    ├── ModelMismatchError        5   two sides have different models
    ├── HubUnreachableError       6   no hub answers at the address
    ├── RefusedError              7   the hub refused this device permanently
    ├── AddressError              8   an address cannot be parsed, resolved or bound
    ├── StorageError              9   a file cannot be read or written
    ├── GraphError               10   an ONNX graph cannot be trained, or is unsafe to run
    ├── AccessError              11   a key is not authorized, or belongs to another hub
    ├── CapacityError            12   this machine is too small for the hub's limits
    ├── UnfitError               13   `edgeasync doctor` found a problem that prevents training
    ├── NoMemoryError            14   not enough memory for a local step
    └── TransitionError           1   a state machine made an invalid transition: a bug in edgeasync

Scripts rely on these codes, so they do not change. Each message states what is wrong, where, and
what to do.
"""

import ast
import re
from typing import Any, ClassVar

_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_SINGLE = ("output", "loss", "base")
"""Arguments with one value, unlike `train` and `freeze`."""

_ARGUMENT = re.compile(rf"\b({'|'.join(_SINGLE)}|train|freeze)=({_QUOTED}|\[{_QUOTED}(?:, {_QUOTED})*\])")


def argument(name: str, *values: str) -> str:
    """Format a keyword argument for a message, in Python syntax.

    `with_flags` converts the result to a flag.

    >>> argument("output", "scores"), argument("train", "head.*")
    ("output='scores'", "train=['head.*']")
    """
    quoted = ", ".join(map(repr, values))
    return f"{name}={quoted}" if name in _SINGLE else f"{name}=[{quoted}]"


def with_flags(sentence: str) -> str:
    """Convert the Python arguments in a message to command-line flags.

    >>> with_flags("give train=['head.*', 'neck.*']")
    "give --train 'head.*' --train 'neck.*'"
    """

    def flags(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1]} {_for_shell(value)}" for value in re.findall(_QUOTED, found[2])])

    return _ARGUMENT.sub(flags, sentence)


def _for_shell(quoted: str) -> str:
    """Convert a quoted Python string to a word in single quotes, in which a shell expands nothing."""
    value = _parsed(quoted)
    return quoted if value is None else "'" + value.replace("'", "'\"'\"'") + "'"


def _parsed(given: str) -> Any:
    """Return a Python value, or `None` if it is not valid. A name in a message may look like one."""
    try:
        return ast.literal_eval(given)
    except (SyntaxError, ValueError):
        return None


def arguments(sentence: str) -> dict[str, Any]:
    """Parse the arguments in a message. Return the last value of each name; lists are concatenated.

    >>> arguments("give output='scores' and loss='mse', or freeze=['a', 'b']")
    {'output': 'scores', 'loss': 'mse', 'freeze': ('a', 'b')}
    """
    found: dict[str, Any] = {}
    for name, given in _ARGUMENT.findall(sentence):
        if (value := _parsed(given)) is not None:
            found[name] = (*found.get(name, ()), *value) if isinstance(value, list) else value
    return found


_NATIVE = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : | ?==> Context: .*|Load model from \S* failed: ?|Status Message: "
    r"|void\* onnxruntime::[\w:]{1,100}\([^()]{0,100}\) "
    r"|(?<!\S)\S+\.(?:h|hpp|c|cc|cpp|cu):\d+:? ?"
    r"(?:.* was false\. ?|(?:\w+: )?Assertion .* failed: ?|[A-Z][a-z]\w+[A-Z]\w+(?= ) ?)?"
    r"|\b[A-Z]\w+::(?=[A-Z])"
)
"""Matches all parts of a C++ library's message except the reason: codes, source lines, functions,
scopes and assertions.
"""

_RUNNING = re.compile(
    r"(?:Exception|Non-zero status code returned while) running (\w+) node\. Name:'([^']*)' ?(.*)"
)
_INVALID = re.compile(r"This is an invalid model\. (?:Error: )?In Node, \(\"([^\"]*)\", (\w+),.*, Error:? (.*)")

_INFERRED = re.compile(r"Node ?\(([^)]*)\) Op ?\((\w+)\) \[\w+\] (.*)")

_REASON_MAX = 300
_LOOKED_AT_MAX = 4000
"""Number of characters of a message that are parsed. The rest may be names from a file, of any length."""


def native_reason(error: BaseException) -> str:
    """Return the reason for an error of onnx or onnxruntime as one line, without C++ source locations."""
    said = _NATIVE.sub("", " ".join(str(error)[:_LOOKED_AT_MAX].split())).strip(" :.")
    if found := _RUNNING.search(said):
        said = f"{_node(found[2], found[1])} fails: {found[3]}"
    elif found := _INVALID.search(said) or _INFERRED.search(said):
        said = f"{_node(found[1], found[2])} is wrong: {found[3]}"
    return said.strip(" :.")[:_REASON_MAX] or type(error).__name__


def _node(name: str, operator: str) -> str:
    return f"node {name!r} ({operator})" if name else f"a node ({operator})"


class EdgeAsyncError(Exception):
    """A failure for which there is no more specific class.

    Every error that edgeasync raises on purpose is an `EdgeAsyncError`, so `except EdgeAsyncError`
    catches all of them.

    Cause: the message names it. The command line also exits with this code after an unexpected
    exception.
    Cure: do what the message says. Report an unexpected exception with `last-events.txt` from the
    run or state folder.

    >>> from edgeasync import EdgeAsyncError, Run
    >>> try:
    ...     Run.open("/nothing")
    ... except EdgeAsyncError as error:
    ...     print(error)
    /nothing: no such folder; pass the folder of a hub's run
    """

    exit_code: ClassVar[int] = 1


class ConfigError(EdgeAsyncError):
    """A setting, flag or settings file is wrong.

    Cause: a key or argument is misspelt, missing, out of bounds, or contradicts another one; or an
    optional package is missing.
    Cure: change the key, flag or argument that the message names. For an unknown key, the message
    suggests the most similar one.
    """

    exit_code = 2


class PluginError(ConfigError):
    """A plugin is missing or misbehaves.

    Cause: the package with your policy, codec or trainer is not installed on this machine, or its
    code returns a value that the protocol does not allow.
    Cure: install the package on this machine, or fix the method that the message names.
    """


class DataError(EdgeAsyncError):
    """A device's local data cannot be used.

    Cause: the file is missing, is not `.npz` or `.csv`, or its shapes, types or labels do not fit
    the model.
    Cure: correct the file or array that the message names.
    """

    exit_code = 3


class ProtocolError(EdgeAsyncError):
    """A peer violated the wire protocol.

    Cause: another version of edgeasync, another program at that address, or a corrupted or hostile
    message.
    Cure: install the same edgeasync version on both sides, and check what listens at the address.
    """

    exit_code = 4


class ModelMismatchError(EdgeAsyncError):
    """Two sides have different models.

    Cause: a hub and its run folder, a hub and a device, or two peers disagree about the model, its
    values or its frozen arrays.
    Cure: for a hub, choose another run folder. On a device, remove the `[model]` table from its
    settings file, or load the base model that the hub uses.
    """

    exit_code = 5


class HubUnreachableError(EdgeAsyncError):
    """No hub answers at the address.

    Cause: the hub is not running, the address is wrong, or a network fault or firewall blocks the
    connection.
    Cure: start the hub, correct the address, or raise `--timeout-s`. An agent waits and retries
    instead of raising this.
    """

    exit_code = 6


class RefusedError(EdgeAsyncError):
    """The hub refused this device permanently.

    Cause: another connected device uses the same name, a later start of this device is connected, a
    newer state has replaced this device's state, the device is quarantined, or its version differs
    from the hub's.
    Cure: rename the device, delete its state folder, or upgrade, as the message says.
    """

    exit_code = 7


class AddressError(EdgeAsyncError):
    """An address cannot be parsed, resolved or bound.

    Cause: a typing error, an unknown host name, a port in use, or an address that other machines
    can reach although no keys are used.
    Cure: correct `--bind` or `--hub`. For connections between machines, use keys, or use
    `--insecure` on a network that you trust.
    """

    exit_code = 8


class StorageError(EdgeAsyncError):
    """A file of a run, of a device's state, or of keys cannot be read or written.

    Cause: a full disk, missing permissions, a damaged file, an unknown file format, or another
    process that uses the folder.
    Cure: free space, correct the permissions, or restore the file that the message names.
    """

    exit_code = 9


class GraphError(EdgeAsyncError):
    """An ONNX graph cannot be trained, or is unsafe to run.

    Cause: an operator without a gradient, an output that does not match the loss, a model that its
    exporter changed, or a training graph that contains forbidden operators.
    Cure: run `edgeasync model inspect`, then export the model again or choose another output, as
    the message says.
    """

    exit_code = 10


class AccessError(EdgeAsyncError):
    """A key is not authorized, or belongs to another hub.

    Cause: the hub does not know this device's key, has revoked it, or is not the hub that the token
    named.
    Cure: enrol the device again, or connect it to the hub that enrolled it.
    """

    exit_code = 11


class CapacityError(EdgeAsyncError):
    """This machine is too small for the hub's limits.

    Cause: the limits allow more memory or connections than the machine has. Only `edgeasync hub
    --check` raises this.
    Cure: lower the limits that the message names, or use a larger machine.
    """

    exit_code = 12


class UnfitError(EdgeAsyncError):
    """`edgeasync doctor` found a problem that prevents training.

    Cause: at least one line of the doctor's report has the level `fail`.
    Cure: apply the remedy in each of these lines.
    """

    exit_code = 13


class NoMemoryError(EdgeAsyncError):
    """There is not enough memory for a local step.

    Cause: the model, or a batch of it, does not fit into the free memory of this device or its GPU.
    Cure: reduce `micro_batch_size`, the batch or the model, or free memory, as the message says.
    """

    exit_code = 14


class TransitionError(EdgeAsyncError):
    """A state machine made an invalid transition.

    Cause: a bug in edgeasync.
    Cure: report it with the message and `last-events.txt`.
    """
