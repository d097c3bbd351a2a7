"""Writes trained LoRA adapters as Hugging Face's PEFT does, so that PEFT can load them into torch."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from edgeasync.durable.files import replace_file
from edgeasync.errors import ConfigError, GraphError
from edgeasync.lora import LoRA
from edgeasync.parameters import Arrays

CONFIG_FILE, ADAPTERS_FILE = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""PEFT wraps the user's module, so all names of parameters begin with this prefix."""

_SAVED = re.compile(r"(?P<module>\w+(\.\w+)*)\.(weight|bias|running_mean|running_var)")
"""Names of arrays whose module PEFT can save as a whole."""

_COUNTED, _COUNT = ".running_mean", ".num_batches_tracked"
"""An array of a batch norm, and its counter, which PEFT needs, but an ONNX file does not have."""

_INSTEAD = "write the arrays under their names in the ONNX file, to a file that ends in .safetensors"


def write_peft(folder: Path, forward: bytes, arrays: Arrays) -> None:
    """Write the adapters among `arrays` and their settings to `folder`.

    `forward` is the serialized forward model with the adapters. Arrays that were trained besides go
    to PEFT's `modules_to_save`. Raises `ConfigError` if the model has no adapters or `folder` is a
    file, `GraphError` if names in the model are not those of a torch module, and `StorageError`.
    """
    from edgeasync.autodiff import adapters, reading  # noqa: PLC0415 - devices do not install onnx

    proto = reading.read(forward)
    lora = adapters.settings_in(proto)
    if lora is None:
        raise ConfigError("the model has no LoRA adapters for PEFT; export it as ONNX instead")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder, but PEFT's format consists of two files; choose a folder")
    layers = adapters.adapted_layers(proto)
    own = {name for layer in layers for name in adapters.adapters_of(layer.name)}
    others = arrays.keys() - own
    modules = {found["module"] for name in others if (found := _SAVED.fullmatch(name))}
    unnamed = [layer.weight for layer in layers if not layer.has_torch_name]
    unnamed += [name for name in others if not _SAVED.fullmatch(name)]
    if unnamed:
        raise GraphError(
            f"PEFT finds modules by their names in torch, but these are others: {', '.join(sorted(unnamed))}; "
            f"export the module with edgeasync.torch.to_onnx, which keeps the names, or {_INSTEAD}"
        )
    if both := modules.intersection(layer.name for layer in layers):
        raise GraphError(
            f"PEFT cannot load adapters together with other arrays of the same module: {', '.join(sorted(both))}; "
            f"{_INSTEAD}"
        )
    _refuse_incomplete(modules, {entry.name for entry in proto.graph.initializer} - own)
    config = peft_config(lora, [layer.name for layer in layers], modules)
    # PEFT also reads what was not trained: the rest of these modules, and frozen adapters.
    kept = {
        entry.name: reading.array_of(entry, f"tensor {entry.name!r}")
        for entry in proto.graph.initializer
        if entry.name in own or ((found := _SAVED.fullmatch(entry.name)) and found["module"] in modules)
    }
    whole = kept | dict(arrays)
    whole |= {f"{module}{_COUNT}": np.zeros((), np.int64) for module in modules if module + _COUNTED in whole}
    tensors = {_PREFIX + name: array for name, array in whole.items()}
    replace_file(folder / ADAPTERS_FILE, safetensors.numpy.save(tensors, {"format": "pt"}), private=False)
    replace_file(folder / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(config)), private=False)


def _refuse_incomplete(saved: Iterable[str], stored: set[str]) -> None:
    """Raise `GraphError` if PEFT could not load the modules in `saved`, which it replaces as a whole.

    PEFT needs all arrays of a module as floats. If it replaces the module `2`, it also replaces
    `0.2`, because it compares the ends of names. `stored` are the names of the model's arrays.
    """
    modules = {name.rpartition(".")[0] for name in stored}
    for module in sorted(saved):
        if f"{module}.weight_quantized" in stored:
            raise GraphError(
                f"PEFT saves the module {module} as a whole, but its weight is quantized; pass the float32 file "
                f"with --model, or {_INSTEAD}"
            )
        alike = re.compile(rf".*{re.escape(module)}(\..*)?")
        if others := sorted(filter(alike.fullmatch, modules - {module})):
            raise GraphError(
                f"PEFT confuses the module {module}, which the run trained besides, with {', '.join(others)}, "
                f"because it compares parts of their names; {_INSTEAD}"
            )


def peft_config(lora: LoRA, layers: Iterable[str], saved: Iterable[str]) -> Mapping[str, Any]:
    """Return PEFT's settings for adapters of `layers`. The modules in `saved` replace the base's.

    PEFT looks for each target at the end of modules' names, so that `2` names `0.2` as well. It
    compares excluded names as a whole, so all modules but these layers are excluded.
    """
    targets = sorted(layers)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "exclude_modules": f"(?!({'|'.join(map(re.escape, targets))})$).*",
        "modules_to_save": sorted(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
