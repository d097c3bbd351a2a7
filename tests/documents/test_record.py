"""`docs.record` runs a command in a terminal and draws what its screen showed."""

import sys
import xml.etree.ElementTree as ET

import pytest

from docs.record import ROWS, draw, record

pytestmark = pytest.mark.asyncio


async def test_frames_show_the_screen_of_a_command(tmp_path):
    program = "import os; print(os.get_terminal_size().lines, os.isatty(0)); print('one\\rtwo <&>')"
    (tmp_path / "program.py").write_text(program)
    frames = await record([sys.executable, "program.py"], tmp_path)
    assert frames[-1][1:4] == [f"{ROWS} True", "two <&>", ""]
    picture = ET.fromstring(draw(frames, "a title"))
    shown = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[0] == "a title"
    assert shown.count("two <&>") >= 1


async def test_a_command_that_fails_ends_the_recording(tmp_path):
    with pytest.raises(SystemExit, match="ended with exit code 3"):
        await record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
