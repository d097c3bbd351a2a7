"""Single operators as torch exports them: gradients against torch in float64, by one and two threads."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import numpy as np
import onnx

from edgeasync.autodiff.export import export_model
from tests.support.models.gradients import session
from tests.support.models.torch_exports import EXPORTS, Stepper, distance, export, torch_step

nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves


class Between(nn.Module):
    """A function of scaled inputs, whose results get one weight each so that no place can be taken for another."""

    def __init__(self, function, x, **parts):
        super().__init__()
        self.before = nn.Parameter(1 + 0.5 * torch.rand(x.shape[1:]))
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        with torch.no_grad():
            self.after = nn.Parameter(torch.randn(self.body(x).shape[1:]))

    def body(self, x):
        return self.function(self, x * self.before)

    def forward(self, x):
        return self.body(x) * self.after


def resize(**options):
    return lambda m, h: F.interpolate(h, **options)


IMAGE, LINE, BOX = (3, 2, 5, 6), (3, 2, 7), (2, 2, 3, 4, 3)
RESIZES = {
    f"{mode}, {corners}, {name}": (IMAGE, resize(mode=mode, align_corners=corners, **size))
    for mode in ("bilinear", "bicubic")
    for corners in (True, False)
    for name, size in {
        "doubled": {"scale_factor": 2}, "1.7": {"scale_factor": 1.7}, "halved": {"scale_factor": 0.5},
        "to a size": {"size": (8, 3)}, "to one": {"size": (1, 9)},
    }.items()
} | {
    "antialiased": (IMAGE, resize(mode="bilinear", size=(3, 4), antialias=True)),
    "antialiased, cubic": (IMAGE, resize(mode="bicubic", size=(3, 4), antialias=True)),
    "nearest": (IMAGE, resize(mode="nearest", scale_factor=2)),
    "nearest, 1.7": (IMAGE, resize(mode="nearest", scale_factor=1.7)),
    "nearest, to a size": (IMAGE, resize(mode="nearest", size=(7, 4))),
    "nearest-exact": (IMAGE, resize(mode="nearest-exact", size=(7, 4))),
    "linear": (LINE, resize(mode="linear", scale_factor=1.5)),
    "linear, aligned": (LINE, resize(mode="linear", size=4, align_corners=True)),
    "trilinear": (BOX, resize(mode="trilinear", size=(5, 2, 4))),
    "nearest, three dimensions": (BOX, resize(mode="nearest", size=(6, 2, 4))),
}  # fmt: skip
PADS = {
    f"{mode}, {len(pads) // 2}": (shape, lambda m, h, mode=mode, pads=pads: F.pad(h, pads, mode=mode))
    for mode in ("reflect", "replicate", "circular")
    for shape, pads in ((LINE, (2, 3)), (IMAGE, (1, 2, 0, 3)), (BOX, (1, 2, 0, 3, 2, 1)))
}
EINSUMS = {
    equation: ((3, 4, 5), lambda m, h, equation=equation: torch.einsum(equation, h, m.w), shape)
    for equation, shape in {
        "bij,jk->bik": (5, 2), "bij,ijk->bk": (4, 5, 2), "bij,kl->bik": (2, 3), "...j,jk->...k": (5, 2),
        "bij,jj->bi": (5, 5), "bij,ik->bkj": (4, 2),
    }.items()
}  # fmt: skip


def turned(m, h):
    """Turn images as a spatial transformer does, from the identity on, whose places are pixels."""
    identity = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=h.dtype)
    moves = (identity + 0.1 * m.w * h.mean((1, 2, 3)).unsqueeze(1)).reshape(-1, 2, 3)
    return F.grid_sample(h, F.affine_grid(moves, [h.shape[0], 2, 4, 5], align_corners=False), align_corners=False)


ROWS = {
    "cumulative sum": (LINE, lambda m, h: h.cumsum(2)),
    "cumulative sum, backwards": (LINE, lambda m, h: h.flip(2).cumsum(2).flip(2)),
    "lower triangle": ((3, 4, 4), lambda m, h: h.tril(1)),
    "upper triangle": ((3, 4, 4), lambda m, h: h.triu(-1)),
    **{op: ((6, 5), lambda m, h, op=op: getattr(torch, op)(h)) for op in ("tan", "sinh", "cosh", "atan", "asinh")},
    **{op: ((6, 5), lambda m, h, op=op: getattr(torch, op)(h.tanh())) for op in ("asin", "acos", "atanh")},
    "acosh": ((6, 5), lambda m, h: torch.acosh(1.1 + h.exp())),
    "fmod": ((6, 5), lambda m, h: torch.fmod(3 * h, 0.7)),
    "remainder": ((6, 5), lambda m, h: torch.remainder(3 * h, 0.7)),
    "local responses": ((3, 6, 3, 2), lambda m, h: F.local_response_norm(h, 5, 0.3, 0.6, 2.0)),
    "pool of norms": (IMAGE, lambda m, h: F.lp_pool2d(h.abs() + 0.1, 2, 2)),
    "transposed convolution in groups": (
        (3, 4, 4, 5), lambda m, h: F.conv_transpose2d(h, m.w, stride=2, padding=1, output_padding=1, groups=2),
        (4, 3, 3, 3)),
    "dilated transposed convolution": (
        (3, 4, 4, 5), lambda m, h: F.conv_transpose2d(h, m.w, stride=(1, 2), dilation=2, groups=4), (4, 2, 3, 2)),
    "pixels": ((3, 8, 2, 3), lambda m, h: F.pixel_shuffle(h, 2)),
    "pixels back": ((3, 2, 4, 6), lambda m, h: F.pixel_unshuffle(h, 2)),
    "instance norm": (IMAGE, lambda m, h: F.instance_norm(h, weight=m.w), (2,)),
    "gather": ((3, 2, 5), lambda m, h: h.gather(2, h.argsort(2)[:, :, :3])),
    "top": (LINE, lambda m, h: h.topk(3, 2).values),
    "added at repeated places": (
        (3, 5), lambda m, h: torch.zeros_like(h).scatter_add(1, (h * 9).long() % 2, h * h)),
    "written": ((3, 5), lambda m, h: h.scatter(1, h.argsort(1)[:, :2], h[:, :2] * 3)),
    "a step of each": ((4, 5, 2), lambda m, h: h[torch.arange(h.shape[0]), h.sum(2).argmax(1)]),
    **{f"sampled, {padding}, {corners}": (
        IMAGE, lambda m, h, padding=padding, corners=corners: F.grid_sample(
            h, torch.tanh(h[:, :, :4, :5].permute(0, 2, 3, 1) + m.w), padding_mode=padding, align_corners=corners),
        (4, 5, 2)) for padding in ("zeros", "border") for corners in (True, False)},
    "a turned image": (IMAGE, turned, (6,)),
    "rows of the batch": ((4, 5), lambda m, h: h[h.sum(1).argsort()]),
}  # fmt: skip
OPERATORS = RESIZES | PADS | EINSUMS | ROWS
NOT_BY_THE_OLDER = {"antialiased", "antialiased, cubic", "nearest-exact", "sinh", "cosh", "asinh", "atanh",
                    "acosh", "local responses", "a turned image"}  # fmt: skip
CASES = [(name, "old, training") for name in OPERATORS if name not in NOT_BY_THE_OLDER]
CASES += [
    (name, "new") for name in OPERATORS if name not in RESIZES or ("ed," not in name and ", to " not in name)
]


def compare(model, x, data):
    found = {threads: Stepper(data, "mse", threads) for threads in (1, 2)}
    target = torch.randn(model(x).shape)
    value, exact, _ = torch_step(model, x, target, "mse")
    _, single, _ = torch_step(model, x, target, "mse", torch.float32)
    for threads, stepper in found.items():
        step = stepper(x, target)
        assert abs(step["loss"] - value) <= 1e-5 * abs(value)
        gradients = {key: entry for key, entry in step.items() if key.endswith(".grad")}
        assert {key.removesuffix(".grad") for key in gradients} == {*exact}
        for key, expected in exact.items():
            limit = max(1e-5, 2 * distance(single[key], expected, 0))
            assert distance(gradients[f"{key}.grad"], expected, 0) <= limit, (key, threads)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_of_an_operator(name, way):
    torch.manual_seed(3)
    shape, function, *weights = OPERATORS[name]
    x = torch.randn(shape)
    parts = {"w": nn.Parameter(torch.randn(weights[0]))} if weights else {}
    model = Between(function, x, **parts)
    compare(model, x, export(model, x, **EXPORTS[way]))


class Last(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.cell = nn.RNN(3, 4, batch_first=True, **options)

    def forward(self, x):
        states, last = self.cell(x)
        return torch.cat([states.flatten(1), last.transpose(0, 1).flatten(1)], 1)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2, "bias": False}], ids=str)
def test_simple_recurrent_layers(nonlinearity, options):
    torch.manual_seed(3)
    model, x = Last(nonlinearity=nonlinearity, **options), torch.randn(5, 6, 3)
    data = export(model, x, **EXPORTS["old, training"])
    stepper = [Stepper(data, "mse", threads) for threads in (1, 2)]
    target = torch.randn(model(x).shape)
    value, exact, _ = torch_step(model, x, target, "mse")
    norm = sum((gradient**2).sum() for gradient in exact.values())
    for entry in stepper:
        found = entry(x, target)
        assert abs(found["loss"] - value) <= 1e-5 * value
        # torch's exporter reorders and joins the weights. The norm of all gradients stays the same, except that
        # both biases of a layer are one array.
        total = sum(
            (gradient.astype(np.float64) ** 2).sum() for key, gradient in found.items() if key.endswith(".grad")
        )
        assert abs(total - norm) <= 1e-5 * norm


class Path(nn.Module):
    """Stochastic depth as torchvision, timm and transformers write it."""

    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        h = self.inner(x)
        return x + (self.draw(h) if self.training else h)


def torchvision_row(h):
    noise = torch.empty([h.shape[0]] + [1] * (h.ndim - 1), dtype=h.dtype, device=h.device)
    return h * noise.bernoulli_(0.75).div_(0.75)


def timm_path(h):
    return h * h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.75).div_(0.75)


def transformers_path(h):
    return h.div(0.75) * (0.75 + torch.rand((h.shape[0], 1), dtype=h.dtype, device=h.device)).floor_()


@pytest.mark.parametrize("way", ["old, training", "new"])
@pytest.mark.parametrize("draw", [torchvision_row, timm_path, transformers_path])
def test_paths_that_are_left_out(draw, way):
    """Drawn anew in every step, with a gradient of the same draw; an exported model leaves out nothing."""
    torch.manual_seed(3)
    model, x = Path(draw), torch.randn(64, 4)
    data = export(model, x, **EXPORTS[way])
    stepper, target = Stepper(data, "mse"), torch.zeros(64, 4)
    assert stepper.graph.warnings == ()
    steps = [stepper(x, target) for _ in range(2)]
    assert steps[0]["loss"] != steps[1]["loss"]
    name = next(key for key in stepper.values if stepper.values[key].shape == (4,))
    for step in steps:
        y = next(value for key, value in step.items() if value.shape == (64, 4))
        kept = (np.abs(y - x.numpy()) > 1e-7).any(1)
        assert 0.5 < kept.mean() < 0.95
        np.testing.assert_allclose(
            step[f"{name}.grad"], (2 * y * kept[:, None] / 0.75).sum(0) / y.size, rtol=1e-4, atol=1e-7
        )
    settled = export_model(data, {})
    kinds = {node.op_type for node in onnx.load_model_from_string(settled).graph.node}
    assert not kinds & {"RandomUniformLike", "Bernoulli"}
    (found,) = session(settled).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, model.eval()(x).detach(), rtol=1e-5, atol=1e-6)
