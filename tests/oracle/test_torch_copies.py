"""Copies between host and GPU, on a CPU that stands for the GPU: one each way, in order, and waited for."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgeasync.sdk.torch_copies import Copies
from tests.support.models.slow_link import SlowLink

nn = torch.nn


class Mixed(nn.Module):
    """Parameters and buffers of several types and strides."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.rough = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.arange(4.0, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(2.0))


@pytest.fixture
def link():
    return SlowLink()


@pytest.fixture
def copies(link):
    return Copies(lambda _: link)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    state = dict(Mixed().state_dict(keep_vars=True))
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def empty_like(tensors):
    return {name: np.full(tuple(tensor.shape), np.nan, np.float32) for name, tensor in tensors.items()}


def values(tensors):
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)


def test_a_read_is_one_copy_of_all_values_and_one_wait(copies, link, tensors):
    found = empty_like(tensors)
    copies.read(tensors, found)
    assert_same(found, values(tensors))
    assert (link.copies, link.waits) == (1, 1)
    assert link.bytes == sum(array.nbytes for array in found.values())


def test_a_read_that_another_thread_ends_has_the_values_of_its_beginning(copies, link, tensors):
    found, expected = empty_like(tensors), values(tensors)
    end = copies.begin_read(tensors, found)
    assert link.waits == 0, "the loop trains on at once"
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    end()
    assert_same(found, expected)


def test_a_write_is_one_copy_and_later_work_sees_it(copies, link, tensors):
    given = {name: np.full(array.shape, 3.0, np.float32) for name, array in values(tensors).items()}
    copies.write(tensors, given)
    assert_same(values(tensors), given)
    assert (link.copies, link.waits) == (1, 0)


def test_arrays_may_come_in_another_order_than_the_tensors(copies, tensors):
    found = empty_like(dict(reversed(tensors.items())))
    copies.read(tensors, found)
    assert_same(found, values(tensors))


def test_what_was_staged_is_added_to_what_the_loop_has_trained_and_statistics_are_replaced(copies, tensors):
    trained = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    before = values(tensors)
    copies.read(tensors, empty_like(tensors))
    staged = {name: np.full(array.shape, 0.5, np.float32) for name, array in before.items()}
    copies.stage(staged)
    copies.read(tensors, empty_like(tensors))  # such as an evaluation
    copies.add(tensors, staged, trained)
    expected = {name: array + 0.5 if name in trained else staged[name] for name, array in before.items()}
    assert_same(values(tensors), expected)


def test_buffers_are_used_again_only_after_the_copies_that_use_them(copies, link, tensors):
    """Many exchanges without a wait in between that the copies do not ask for."""
    trained = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    random = np.random.default_rng(0)
    for _ in range(20):
        given = {name: random.integers(-8, 8, a.shape).astype(np.float32) for name, a in values(tensors).items()}
        copies.write(tensors, given)
        assert_same(values(tensors), given)
        found = empty_like(tensors)
        end = copies.begin_read(tensors, found)
        staged = {name: random.integers(-8, 8, a.shape).astype(np.float32) for name, a in given.items()}
        copies.stage(staged)
        copies.add(tensors, staged, trained)
        end()
        assert_same(found, given)
        expected = {name: given[name] * (name in trained) + staged[name] for name in given}
        assert_same(values(tensors), expected)
    assert link.copies == 3 * 20
    assert link.buffers == 3, "one on the GPU, two pinned"


def test_a_second_read_waits_until_the_first_has_ended(copies, tensors):
    first, second = empty_like(tensors), empty_like(tensors)
    end = copies.begin_read(tensors, first)
    expected = values(tensors)
    assert not copies._flat[1]._host_is_free.acquire(blocking=False)
    end()
    copies.read(tensors, second)
    assert_same(second, expected)


def test_other_arrays_get_other_buffers(copies, link, tensors):
    copies.read(tensors, empty_like(tensors))
    few = dict(list(tensors.items())[:2])
    for each in (few, few, tensors):
        found = empty_like(each)
        copies.read(each, found)
        assert_same(found, values(each))
    assert link.buffers == 2 * 3


def test_tensors_on_a_cpu_are_copied_as_they_were(tensors):
    copies, found = Copies(), empty_like(tensors)
    copies.read(tensors, found)
    assert_same(found, values(tensors))
    copies.stage(found)
    copies.add(tensors, found, set(found))
    assert_same(values(tensors), {name: 2 * array for name, array in found.items()})
    copies.write(tensors, found)
    assert_same(values(tensors), found)


def test_pinned_memory_is_filled_again_only_after_the_host_has_waited_for_its_copy(copies, tensors):
    """The link notices if it is not so."""
    given = [
        {name: np.full(a.shape, float(n), np.float32) for name, a in values(tensors).items()} for n in (1, 2, 3)
    ]
    for each in given:
        copies.write(tensors, each)
        assert_same(values(tensors), each)
    for each in given:
        copies.stage(each)
        copies.add(tensors, each, set(tensors))
    assert_same(values(tensors), {name: np.full(a.shape, 9.0) for name, a in given[0].items()})
