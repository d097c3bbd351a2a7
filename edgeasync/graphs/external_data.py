"""Reads values that a model stores in files beside it, as torch's newer exporter does.

The model names these files. A malicious model could name any file of this machine, whose content
would then be sent to all devices. So only files in the model's folder are read, and only if their
names begin with the model's: `classifier.onnx.data` for `classifier.onnx`. Links are refused.
"""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from edgeasync.errors import GraphError
from edgeasync.regular_file import open_regular

DIGITS_MAX = 19
"""Maximum number of digits of an offset or a length."""


def insert_external_data(content: bytes, path: Path, *, bytes_max: int) -> bytes:
    """Return a serialized model that contains all its values, as if it were stored in one file.

    `path` is the model's file. `bytes_max` limits the size of the result. Raises `GraphError` if a
    value is in a file that may not be read, or that is incomplete.
    """
    if b"location" not in content:  # the key of an external file's name
        return content
    from edgeasync.autodiff import reading  # noqa: PLC0415 - devices do not install onnx

    try:
        model = reading.read_message(content)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    left = bytes_max - len(content)
    for tensor in reading.external_tensors(model):
        facts = {entry.key: entry.value for entry in tensor.external_data}
        name, where = facts.get("location", ""), f"{path}: tensor {tensor.name!r}"
        with _open(path, name, where) as file:
            end, start = os.fstat(file.fileno()).st_size, _number(facts.get("offset", "0"), where)
            nbytes = _number(facts["length"], where) if "length" in facts else max(0, end - start)
            if start + nbytes > end:
                raise GraphError(
                    f"{where} ends at byte {start + nbytes} of the external file {name!r}, which has only {end} "
                    "bytes; copy or download that file again"
                )
            left -= nbytes
            if left < 0:
                raise GraphError(
                    f"{path}: with its external files, the model has more than {bytes_max} bytes, which is the "
                    "limit of an ONNX file; choose a smaller model"
                )
            file.seek(start)
            tensor.raw_data = file.read(nbytes)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return bytes(model.SerializeToString(deterministic=True))


def _open(path: Path, name: str, where: str) -> BinaryIO:
    whole = f"save the model as one file: onnx.save(onnx.load({path.name!r}), 'whole.onnx')"
    if not name.startswith(path.name) or {"/", "\\", "\0"}.intersection(name):
        raise GraphError(
            f"{where} is stored in the external file {name!r}, but only files beside the model whose names begin "
            f"with {path.name!r} are read; if you renamed the model, restore its name, or if you trust it, {whole}"
        )
    try:
        return open_regular(path.with_name(name), links=False)
    except FileNotFoundError:
        raise GraphError(
            f"{where} is stored in the external file {name!r}, which is missing; copy it to the model's folder"
        ) from None
    except OSError as error:
        reason = "is a link; replace the link by the file" if error.errno == errno.ELOOP else ""
        raise GraphError(
            f"{where} is stored in the external file {name!r}, which "
            f"{reason or f'cannot be read: {error.strerror}; correct the file'}"
        ) from error


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX):
        raise GraphError(
            f"{where} has {text[:30]!r} as its offset or length in an external file; export the model again"
        )
    return int(text)
