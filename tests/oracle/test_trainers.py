"""Lightning's and Hugging Face's trainers join; at size `nightly` alone, which needs the extra `trainers`."""

import re
from pathlib import Path

import pytest

from tests.support.programs.killed_loops import kill_and_come_back
from tests.support.size import repetitions

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
JOINING = {"import edgeasync", "with edgeasync.join(", "session.batches("}


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )


def bert():
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - too large for the gate

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=12, **sizes))


@pytest.mark.parametrize("name", ["lightning_joined.py", "huggingface_joined.py"])
def test_a_trainers_script_joins_by_three_lines(name):
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    joining = [
        line
        for line in lines
        if ("edgeasync" in line and "load_digits" not in line)  # the data is its own
        or ("session." in line and not line.startswith("print"))
    ]
    assert len(joining) <= 3
    assert all(any(part in line for part in JOINING) for line in joining)


if repetitions("trainers of other libraries"):

    def test_lightning_joins_is_killed_and_resumes(tmp_path):
        last, counted = kill_and_come_back(ROOT / "examples/lightning_joined.py", Digits(), tmp_path)
        steps, here, accuracy = (float(word) for word in re.findall(r"[0-9.]+", last))
        assert steps == counted
        assert here % 44 != 0, "it continues inside an epoch"
        assert accuracy > 0.91, "within 1 point of what one process reaches, 0.9219"

    def test_hugging_face_joins_is_killed_and_comes_back(tmp_path):
        last, counted = kill_and_come_back(ROOT / "examples/huggingface_joined.py", bert(), tmp_path)
        steps, here, accuracy = (float(word) for word in re.findall(r"[0-9.]+", last))
        assert steps == counted
        assert here == 320
        assert accuracy > 0.98
