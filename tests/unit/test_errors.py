"""Messages say the same in Python and at a command: there an argument is a flag."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError, argument, arguments, native_reason, with_flags
from edgeasync.runtime.hub_settings import HubSettings
from tests.fuzz.running import limited

PATIENCE_S = 10.0
LONG = ("/", "x", "'", "a.h:1 ", "/a.h:", "/a.h:1 ", "train=['", "train=['a', '", "Load model from ")
"""What names out of a file may be made of, so that an expression looks at each place again and again."""


@pytest.mark.parametrize(
    ("name", "values", "python", "command"),
    [
        ("output", ["scores"], "output='scores'", "--output 'scores'"),
        ("loss", ["mse"], "loss='mse'", "--loss 'mse'"),
        ("base", ["int8"], "base='int8'", "--base 'int8'"),
        ("train", ["head.*"], "train=['head.*']", "--train 'head.*'"),
        ("freeze", ["a", "b[0].w"], "freeze=['a', 'b[0].w']", "--freeze 'a' --freeze 'b[0].w'"),
        ("train", ["it's $1"], 'train=["it\'s $1"]', "--train 'it'\"'\"'s $1'"),
        ("train", ["a'b\"c"], "train=['a\\'b\"c']", "--train 'a'\"'\"'b\"c'"),
    ],
)
def test_an_argument_is_a_flag_of_the_command(name, values, python, command):
    sentence = f"no gradient; give {argument(name, *values)}, or another model"
    assert sentence == f"no gradient; give {python}, or another model"
    assert with_flags(sentence) == f"no gradient; give {command}, or another model"


@pytest.mark.parametrize("said", ["optimize=False", "dynamo=False, training=torch.onnx.TrainingMode.TRAINING"])
def test_what_is_said_of_another_tool_stays(said):
    assert with_flags(f"export with {said}") == f"export with {said}"


def test_a_failed_allocation_is_told_without_the_function_that_failed():
    said = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Pad node. Name:'p' "
        "Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 "
        "void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) "
        "Failed to allocate memory for requested buffer of size 8"
    )
    found = native_reason(ValueError(said))
    assert found == "node 'p' (Pad) fails: Failed to allocate memory for requested buffer of size 8"


@pytest.mark.parametrize("name", ["train='\\x'", "output='a\nb'", "loss=['\\u1']"])
def test_a_name_that_looks_like_an_argument_is_no_mistake(name):
    said = f"tensor {name} has no gradient; give {argument('loss', 'mse')}"
    assert name.partition("=")[2].strip("[]") in with_flags(said)
    assert arguments(said) == {"loss": "mse"}


@pytest.mark.parametrize("part", LONG)
def test_names_of_any_length_take_no_long_time_to_tell(part):
    said = part * (1_000_000 // len(part))
    with limited(PATIENCE_S):
        assert len(native_reason(ValueError(said))) <= 300
        with_flags(said)


@pytest.mark.parametrize(
    "table", [{"hub": {"b" * 1_000_000: 1}}, {"model": {"kind": "s" * 1_000_000}}], ids=[*"kv"]
)
def test_nor_do_settings(table):
    with limited(PATIENCE_S), pytest.raises(ConfigError):
        convert(table, HubSettings, where="hub.json")
