"""Batches of the data loader: contents and order."""

import logging

import numpy as np
import pytest

from edgeasync import Dataset
from edgeasync.async_train import data
from edgeasync.errors import ConfigError, DataError
from examples.async_train.digits_idx import write_idx_digits


def test_a_loader_gives_every_example_once_in_an_order_of_its_seed():
    given = Dataset.of(np.arange(10.0)[:, None], np.arange(10))
    loader = data.DataLoader(given, batch_size=4, shuffle=True, seed=5)
    assert len(loader) == 3
    passes = [np.concatenate([y for _, y in loader]).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    assert all(sorted(each) == list(range(10)) for each in passes)
    again = data.DataLoader(given, batch_size=4, shuffle=True, seed=5)
    again.epoch = 1
    assert np.concatenate([y for _, y in again]).tolist() == passes[1]
    dropping = data.DataLoader(given, batch_size=4, drop_last=True)
    assert [len(x.to("cuda")) for x, _ in dropping] == [4, 4] == [4] * len(dropping)


def test_a_subset_has_the_items_at_its_indices(tmp_path):
    digits_ = data.MNIST(write_idx_digits(tmp_path))
    part = data.Subset(data.Subset(digits_, range(100, 200)), [3, 1])
    assert np.array_equal(part[0][0], digits_[103][0])
    assert part.targets.tolist() == digits_.targets[[103, 101]].tolist()
    with pytest.raises(DataError, match="out of range: the dataset has 1400"):
        data.Subset(digits_, [1400])


def test_workers_and_pinned_memory_are_ignored_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, "edgeasync.async_train"):
        for _ in range(2):
            data.DataLoader([([0.0], 0)], batch_size=1, num_workers=4, pin_memory=True)
    said = [record.message for record in caplog.records if record.message.startswith("DataLoader")]
    assert sorted(said) == sorted(set(said))
    with pytest.raises(TypeError, match="pinmemory"):
        data.DataLoader([([0.0], 0)], pinmemory=True)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        data.DataLoader([([0.0], 0)], batch_size=0)
