"""Gradients of sampled images, by the image and by the places, against finite differences."""

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers


def sampled(images, grid, padding, corners):
    """Interpolate in float64; onnx's own evaluator rounds the places to float32."""
    rows, columns = images.shape[2:]
    at = []
    for place, size in zip(np.moveaxis(grid, -1, 0), (columns, rows), strict=True):
        pixel = (place + 1) / 2 * (size - 1) if corners else ((place + 1) * size - 1) / 2
        at.append(np.clip(pixel, 0, size - 1) if padding == "border" else pixel)
    wide, total = np.pad(images, [(0, 0), (0, 0), (9, 9), (9, 9)]), 0.0
    for right, down in np.ndindex(2, 2):
        column, row = np.floor(at[0]).astype(int) + right, np.floor(at[1]).astype(int) + down
        share = (1 - abs(at[0] - column)) * (1 - abs(at[1] - row))
        seen = wide[np.arange(len(images))[:, None, None], :, row + 9, column + 9]
        total = total + share[..., None] * seen
    return np.moveaxis(total, -1, 1)


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("corners", [0, 1])
def test_sampled_images(padding, corners):
    """Places are partly outside the image. They are computed from the batch, so that each image has its own."""
    text = f"""r = Reshape(h, image)
        t = Tanh(h)
        m = MatMul(t, w)
        g = Reshape(m, grid)
        y = GridSample<mode="linear", padding_mode="{padding}", align_corners={corners}>(r, g)"""

    def formula(x, parameters):
        h = x * parameters["p"]
        grid = (np.tanh(h) @ parameters["w"]).reshape(-1, 4, 5, 2)
        return sampled(h.reshape(-1, 2, 3, 4), grid, padding, corners)

    check(text, (24,), {"image": np.array([-1, 2, 3, 4]), "w": 0.4 * numbers((24, 40), 5),
                        "grid": np.array([-1, 4, 5, 2])}, opset=20,
          reference=formula)  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "x", "grid"),
    [
        ('mode="cubic"', (2, 3, 4), (1, 4, 5, 2)),
        ('mode="nearest"', (2, 3, 4), (1, 4, 5, 2)),
        ('mode="linear", padding_mode="reflection"', (2, 3, 4), (1, 4, 5, 2)),
        ('mode="linear"', (1, 2, 3, 4), (1, 4, 5, 2, 3)),
    ],
)
def test_other_samples_are_refused(attributes, x, grid):
    text = f"h = Mul(x, p)\ny = GridSample<{attributes}>(h, g)"
    model = forward(text, {"p": numbers((1, *x)), "g": np.tanh(numbers(grid))}, x, opset=20, batch=1)
    with pytest.raises(GraphError, match="use bilinear sampling of images with zeros or border padding"):
        build_training_graph(model, GraphSettings(loss="mse"))
