"""The library that the page contains is unmodified, and comes with its licence."""

import hashlib
from pathlib import Path

import edgeasync

VENDOR = Path(edgeasync.__file__).parent / "web/page/vendor"
ROOT = Path(edgeasync.__file__).parents[1]


def test_vendored_files_are_those_of_the_recorded_release():
    lines = (VENDOR / "SHA256SUMS").read_text("utf-8").splitlines()
    recorded = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["SHA256SUMS"]
    assert found == recorded
    assert "uPlot (v1.6.32)" in (VENDOR / "uPlot.iife.min.js").read_text("utf-8")[:200]


def test_the_licence_is_named_where_licences_are():
    assert "MIT" in (VENDOR / "LICENSE").read_text("utf-8")
    notice = (ROOT / "NOTICE").read_text("utf-8")
    assert "edgeasync/web/page/vendor holds uPlot 1.6.32" in notice
    assert "edgeasync/web/page/vendor/LICENSE" in (ROOT / "pyproject.toml").read_text("utf-8")
