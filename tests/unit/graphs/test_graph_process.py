"""What a build of an unknown model may use by default. The limits themselves are tried in tests/security."""

from edgeasync.config import ByteCount
from edgeasync.graphs import graph_process
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.host_info import half_of_memory_bytes, memory_limit_bytes


def test_by_default_a_build_gets_half_of_the_memory_and_five_minutes():
    model = OnnxModel(file="m.onnx")
    assert graph_process.memory_bytes_max(model) == half_of_memory_bytes() == memory_limit_bytes() // 2 > 0
    assert model.build_s_max == 900.0
    chosen = OnnxModel(file="m.onnx", build_memory_bytes_max=ByteCount(1 << 20))
    assert graph_process.memory_bytes_max(chosen) == 1 << 20
