"""The page about sizes has what `edgeasync hub --check` computes."""

import re
from pathlib import Path

import pytest

from edgeasync.core.hub.settings import Limits
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.runtime.memory import THREADS_BYTES, most_memory

HUB = Path(__file__).parents[2] / "docs/operate"
PROCESS_BYTES = (64 << 20) + THREADS_BYTES
WORDS = {"thousand": 10**3, "million": 10**6}


def parts(parameters, **limits):
    """Return the bytes of each part for a model of this size; the process is that of the page, not this one."""
    found = most_memory(
        ParameterSpec((Parameter("weights", (parameters,)),)),
        RunSettings(limits=Limits(**limits)),
        evaluated=False,
    )
    return {part.name: part.nbytes for part in found} | {"process": PROCESS_BYTES}


def rows():
    page = (HUB / "sizing.md").read_text("utf-8")
    for number, word, devices, worst in re.findall(
        r"^\| ([\d.]+) (thousand|million)[^|]*\| (\d+) \| [^|]*\| ([^|]*) \|$", page, re.MULTILINE
    ):
        for said in worst.split(";"):
            limits = {key: int(value) for key, value in re.findall(r"`(\w+) = (\d+)`", said)}
            yield float(number) * WORDS[word], int(devices), limits, float(re.search(r"([\d.]+) GB", said)[1])


@pytest.mark.parametrize(("parameters", "devices", "limits", "gigabytes"), list(rows()))
def test_the_worst_is_what_the_command_computes(parameters, devices, limits, gigabytes):
    computed = sum(parts(int(parameters), devices_max=devices, **limits).values()) / 1e9
    assert gigabytes == pytest.approx(computed, rel=0.05)


def test_the_page_names_each_part():
    table = re.search(r"\| part \|.*?\n\n", (HUB / "sizing.md").read_text("utf-8"), re.DOTALL)[0]
    named = re.findall(r"`([a-z ]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line))
    assert sorted(named) == sorted(parts(1000))


def test_the_page_about_bounds_has_the_sum_of_a_usual_hub():
    page = (HUB / "bounds.md").read_text("utf-8")
    said = re.search(r"devices_max = 1000` and a model of 1 MB the sum is about (\d+) MiB", page)
    assert int(said[1]) == pytest.approx(sum(parts(250_000, devices_max=1000).values()) / 2**20, rel=0.03)
