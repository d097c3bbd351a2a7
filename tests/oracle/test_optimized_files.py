"""A small BERT that onnxruntime's optimizer has fused trains as the original file does, and as torch."""

import copy

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sympy")  # of onnxruntime.transformers

from tests.support.models.torch_exports import open_graph

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves

nn, F = torch.nn, torch.nn.functional
