"""Where trained arrays may be written."""

import numpy as np
import pytest

from edgeasync.errors import ConfigError
from edgeasync.graphs.export import check_export_file, write_arrays


def test_an_export_replaces_an_earlier_one_but_no_examples(tmp_path):
    data, trained = tmp_path / "data.npz", tmp_path / "trained.npz"
    np.savez(data, x=np.eye(4), y=[0, 1, 0, 1])
    write_arrays(trained, {"w": np.ones(3, np.float32)})
    for path in (trained, tmp_path / "new.npz"):
        check_export_file("--out", path)
    with pytest.raises(ConfigError, match=r"--out .*data\.npz: contains examples, which would be lost"):
        check_export_file("--out", data)


def test_a_file_that_is_no_archive_may_be_replaced(tmp_path):
    path = tmp_path / "trained.npz"
    path.write_bytes(b"cut short")
    check_export_file("--out", path)
