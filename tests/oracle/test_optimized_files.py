"""A small BERT that onnxruntime's optimizer has fused trains as the original file does, and as torch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sympy")  # of onnxruntime.transformers


pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves

nn, F = torch.nn, torch.nn.functional
