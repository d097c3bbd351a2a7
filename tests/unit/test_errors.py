"""Messages say the same in Python and at a command: there an argument is a flag."""

import pytest

from edgeasync.errors import argument, with_flags


@pytest.mark.parametrize(
    ("name", "values", "python", "command"),
    [
        ("output", ["scores"], "output='scores'", "--output 'scores'"),
        ("loss", ["mse"], "loss='mse'", "--loss 'mse'"),
        ("train", ["head.*"], "train=['head.*']", "--train 'head.*'"),
        ("freeze", ["a", "b[0].w"], "freeze=['a', 'b[0].w']", "--freeze 'a' --freeze 'b[0].w'"),
        ("train", ["it's"], 'train=["it\'s"]', '--train "it\'s"'),
    ],
)
def test_an_argument_is_a_flag_of_the_command(name, values, python, command):
    sentence = f"no gradient; give {argument(name, *values)}, or another model"
    assert sentence == f"no gradient; give {python}, or another model"
    assert with_flags(sentence) == f"no gradient; give {command}, or another model"


@pytest.mark.parametrize("said", ["optimize=False", "dynamo=False, training=torch.onnx.TrainingMode.TRAINING"])
def test_what_is_said_of_another_tool_stays(said):
    assert with_flags(f"export with {said}") == f"export with {said}"
