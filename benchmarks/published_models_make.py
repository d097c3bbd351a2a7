"""Lists the models of five libraries and makes them with random weights.

Runs in the environment that `published_models --install-peers` creates.
"""

import inspect
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Families = dict[str, list[str]]
"""Family -> names of its models."""

Example = dict[str, Tensor]
"""The inputs of a model by the names of `forward`'s parameters, with the batch on axis 0."""

SIZE, SIZE_OF_MOST = 96, 224
"""Pictures have this height and width. Models that do not accept the first get the second."""


@dataclass(frozen=True)
class Library:
    """A list of models, and how to make one of them and its inputs."""

    families: Callable[[], Families]
    make: Callable[[str], Any]
    examples: Callable[[Any], Iterator[Example]]


# -- torchvision -----------------------------------------------------------------------------------


@cache
def _torchvision() -> Any:
    """Import torchvision, even if its compiled operators were built for another version of torch.

    torchvision registers implementations of two of them, which must therefore be defined.
    """
    found = util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    try:
        for path in Path(found.origin).parent.glob("_C*"):
            torch.ops.load_library(path)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return import_module("torchvision.models")


_NO_CLASSIFIERS = ("detection", "optical_flow", "quantization")
"""Folders of torchvision whose models have other losses, or are quantized."""


def _torchvision_families() -> Families:
    models, found = _torchvision(), defaultdict[str, list[str]](list)
    for name in models.list_models():
        path = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        if path.partition(".")[0] not in _NO_CLASSIFIERS:
            found[path].append(name)
    return dict(found)


def _torchvision_make(name: str) -> nn.Module:
    models = _torchvision()
    own = inspect.signature(models.get_model_builder(name)).parameters
    without = {key: None for key in ("weights", "weights_backbone") if key in own}
    return models.get_model(name, **without)


def _pictures(channels: int, sizes: tuple[int, ...], name: str) -> Iterator[Example]:
    for size in sizes:
        yield {name: torch.randn(2, channels, size, size)}


def _torchvision_examples(module: Any) -> Iterator[Example]:
    own = next(iter(inspect.signature(module.forward).parameters))
    if ".video." in type(module).__module__:
        yield {own: torch.randn(2, 3, 16, 64, 64)}
    yield from _pictures(3, (SIZE, SIZE_OF_MOST), own)


# -- timm ------------------------------------------------------------------------------------------


def _timm() -> Any:
    _torchvision()
    return import_module("timm")


def _timm_families() -> Families:
    timm = _timm()
    found = {module: sorted(timm.list_models(module=module)) for module in sorted(timm.list_modules())}
    return {module: names for module, names in found.items() if names}


def _timm_make(name: str) -> nn.Module:
    return _timm().create_model(name, pretrained=False)


def _timm_examples(module: Any) -> Iterator[Example]:
    channels, height, width = module.default_cfg["input_size"]
    own = next(iter(inspect.signature(module.forward).parameters))
    if not module.default_cfg.get("fixed_input_size"):
        yield from _pictures(channels, (SIZE,), own)
    yield {own: torch.randn(2, channels, height, width)}


# -- transformers ----------------------------------------------------------------------------------

_TASKS = ("IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "AUDIO_CLASSIFICATION")

_SHRUNK: Mapping[str, Any] = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "vocab_size": 1000, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
"""Fewer layers and words than by default. All other settings are the defaults."""


def _auto(module: str) -> Any:
    _torchvision()
    return import_module(f"transformers.models.auto.{module}")


def _transformers_families() -> Families:
    auto, found = _auto("modeling_auto"), defaultdict[str, list[str]](list)
    for task in _TASKS:
        for kind in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES"):
            found[kind].append(f"{kind}/{task.lower()}")
    return {kind: found[kind] for kind in sorted(found)}


def _transformers_make(name: str) -> nn.Module:
    kind, _, task = name.partition("/")
    made = getattr(_auto("modeling_auto"), f"MODEL_FOR_{task.upper()}_MAPPING_NAMES")[kind]
    config_type = _auto("configuration_auto").CONFIG_MAPPING[kind]
    plain = config_type()
    config = config_type(**{key: value for key, value in _SHRUNK.items() if getattr(plain, key, None) is not None})
    config.pad_token_id = 0
    config.use_cache = False
    return getattr(import_module("transformers"), made if isinstance(made, str) else made[0])(config)


def _transformers_examples(module: Any) -> Iterator[Example]:
    own, config = module.main_input_name, module.config
    if own == "input_ids":
        yield {own: torch.randint(1, config.vocab_size, (2, 16))}
    elif own == "pixel_values":
        sizes = getattr(config, "image_size", None) or SIZE_OF_MOST
        size = sizes if isinstance(sizes, int) else sizes[0]
        yield from _pictures(getattr(config, "num_channels", 3), (SIZE, size), own)
    elif own == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        yield {own: torch.randn(2, config.max_length, bins) if bins else torch.randn(2, 8000)}
    else:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80)
        yield {own: torch.randn(2, bins, 3000)}
        yield {own: torch.randn(2, 64, bins)}


# -- MONAI -----------------------------------------------------------------------------------------

_GIVEN: Mapping[str, Any] = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "num_classes": 2, "n_classes": 2, "num_class": 2,
    "channels": (8, 16, 32), "strides": (2, 2), "img_size": (64, 64), "in_shape": (1, 64, 64), "classes": 2,
    "patch_size": (16, 16), "latent_size": 8, "dimensions": 2, "num_channel_initial": 8, "depth": 3,
    "hidden_channels": (16, 16), "in_size": 64, "out_size": 4, "out_shape": (2,), "kernel_size": 3,
    "num_channels": 8,
}  # fmt: skip
"""Values of constructor arguments that have no default."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "DynUNet": {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "EfficientNetBN": {"model_name": "efficientnet-b0", "pretrained": False, "in_channels": 1, "num_classes": 2},
    "FlexibleUNet": {"backbone": "efficientnet-b0", "pretrained": False},
    "ViT": {"classification": True, "hidden_size": 96, "mlp_dim": 192, "num_layers": 3, "num_heads": 4},
    "ViTAutoEnc": {"hidden_size": 96, "mlp_dim": 192, "num_layers": 3, "num_heads": 4},
    "UNETR": {"feature_size": 8, "hidden_size": 96, "mlp_dim": 192, "num_heads": 4},
    "SwinUNETR": {"feature_size": 12},
    "TorchVisionFCModel": {"model_name": "resnet18", "pretrained": False, "num_classes": 2},
}
"""Arguments of single models."""


def _nets() -> Any:
    _torchvision()
    return import_module("monai.networks.nets")


def _monai_families() -> Families:
    nets, found = _nets(), defaultdict[str, list[str]](list)
    seen = set[type]()
    for name in sorted(vars(nets), key=lambda name: (name.upper() == name, name)):
        made = getattr(nets, name)
        if isinstance(made, type) and issubclass(made, nn.Module) and made not in seen:
            seen.add(made)
            found[made.__module__.removeprefix("monai.networks.nets.")].append(made.__name__)
    return {family: sorted(names) for family, names in sorted(found.items())}


def _monai_make(name: str) -> nn.Module:
    made = getattr(_nets(), name)
    needed = {
        key
        for key, entry in inspect.signature(made).parameters.items()
        if entry.default is entry.empty and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    }
    if "spatial_dims" in inspect.signature(made).parameters:
        needed.add("spatial_dims")
    own = _OWN.get(name, {})
    return made(**{key: _GIVEN[key] for key in needed - own.keys()}, **own)


def _monai_examples(module: Any) -> Iterator[Example]:
    own = next(iter(inspect.signature(module.forward).parameters))
    for channels in (1, 3):
        yield from _pictures(channels, (64,), own)
    for channels in (1, 3):
        yield {own: torch.randn(2, channels, 32, 32, 32)}
    yield {own: torch.randn(2, 64)}


# -- Keras -----------------------------------------------------------------------------------------


def _keras() -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    return import_module("keras")


def _keras_families() -> Families:
    applications = _keras().applications
    return {
        family: names
        for family, module in sorted(vars(applications).items())
        if inspect.ismodule(module)
        if (names := sorted(name for name, made in vars(module).items() if name[0].isupper() and callable(made)))
    }


def _keras_make(name: str) -> Any:
    return getattr(_keras().applications, name)(weights=None, input_shape=(SIZE, SIZE, 3))


def _keras_examples(_: Any) -> Iterator[Example]:
    yield {"x": torch.randn(2, SIZE, SIZE, 3)}


# -- wheels ----------------------------------------------------------------------------------------

_FRONT_END = "melspectrogram.onnx"
"""A fixed transformation of sound, not a network."""


def _wheel_folder() -> Path:
    found = util.find_spec("openwakeword")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "resources/models"


def _wheel_families() -> Families:
    return {path.stem: [path.name] for path in sorted(_wheel_folder().glob("*.onnx")) if path.name != _FRONT_END}


def _wheel_make(name: str) -> bytes:
    return (_wheel_folder() / name).read_bytes()


def _wheel_examples(_: Any) -> Iterator[Example]:
    yield {}


LIBRARIES: Mapping[str, Library] = {
    "torchvision": Library(_torchvision_families, _torchvision_make, _torchvision_examples),
    "timm": Library(_timm_families, _timm_make, _timm_examples),
    "transformers": Library(_transformers_families, _transformers_make, _transformers_examples),
    "MONAI": Library(_monai_families, _monai_make, _monai_examples),
    "Keras": Library(_keras_families, _keras_make, _keras_examples),
    "openwakeword": Library(_wheel_families, _wheel_make, _wheel_examples),
}


VARIANTS = 6
PARAMETERS_MAX = 60_000_000


def draw(library: str, seed: int, count: int) -> dict[str, Any]:
    """Draw `count` models of different families.

    The families are shuffled by the seed. Of up to `VARIANTS` models of a family, the one with the
    fewest parameters is drawn. Returns the models in order, and those that are left out, with the
    reasons.
    """
    generator = random.Random(f"{seed} {library}")
    families, left_out, models = LIBRARIES[library].families(), dict[str, str](), list[str]()
    names = sorted(families)
    generator.shuffle(names)
    for family in names:
        variants = sorted(generator.sample(families[family], min(VARIANTS, len(families[family]))))
        try:
            name, size = smallest(library, variants)
        except ValueError as error:
            left_out[family] = f"cannot be made: {error}"
            continue
        if size > PARAMETERS_MAX:
            left_out[name] = f"too large: {size / 1e6:.0f} million parameters"
        else:
            models.append(name)
        if len(models) == count:
            break
    return {"models": models, "left out": left_out}


def smallest(library: str, names: list[str]) -> tuple[str, int]:
    """Return the model with the fewest parameters, and their number.

    Models are made without memory for their values. If this fails for all of them, the one with the
    shortest name is made with values. Raises `ValueError` with the reason if this fails, too.
    """
    sizes, reason = dict[str, int](), "no model"
    for name, device in [*((name, "meta") for name in names), (min(names, key=len), "cpu")]:
        if device == "cpu" and sizes:
            break
        try:
            sizes[name] = size_of(library, name, device)
        except Exception as error:  # noqa: BLE001 - of a library
            reason = f"{type(error).__name__}: {error}"
    if not sizes:
        raise ValueError(reason)
    name = min(sizes, key=sizes.__getitem__)
    return name, sizes[name]


def size_of(library: str, name: str, device: str) -> int:
    """Return the number of a model's parameters; on the device "meta", it needs no memory."""
    if library == "openwakeword":
        return len(LIBRARIES[library].make(name)) // 4
    if library == "Keras":
        with _keras().device(device):
            return int(LIBRARIES[library].make(name).count_params())
    with torch.device(device):
        return sum(parameter.numel() for parameter in LIBRARIES[library].make(name).parameters())


def make(library: str, name: str, seed: int) -> Any:
    """Make a model with random weights, none of which are all equal, as in a trained model."""
    random.seed(seed)
    torch.manual_seed(seed)
    module = LIBRARIES[library].make(name)
    if isinstance(module, nn.Module):
        module.eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for key, buffer in module.named_buffers():
                if key.endswith("running_mean"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
                elif key.endswith("running_var"):
                    buffer.mul_(1 + 0.2 * torch.rand_like(buffer))
    return module


def example_of(library: str, module: Any) -> Example:
    """Return inputs that the model accepts; raises the model's last error if it accepts none."""
    failure: Exception | None = None
    for example in LIBRARIES[library].examples(module):
        try:
            with torch.no_grad():
                if isinstance(module, nn.Module):
                    module(**example) if library != "Keras" else module(example["x"])
        except Exception as error:  # noqa: BLE001 - of a library
            failure = error
        else:
            return example
    assert failure is not None
    raise failure
