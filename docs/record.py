"""Records the demo as it runs in a terminal: `python -m docs.record` writes docs/pictures/demo.svg (extra `test`).

The picture plays at the speed of the run. A reader who prefers less motion sees its last frame.
"""

import asyncio
import os
import pty
import sys
import tempfile
import termios
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pyte

PICTURE = Path(__file__).parent / "pictures/demo.svg"

COLUMNS, ROWS = 76, 27
FRAME_S = 0.5
"""Seconds between two frames."""

LAST_FRAME_S = 8.0
"""Seconds for which the last frame stays before the recording starts over."""

CELL_WIDTH, CELL_HEIGHT, MARGIN, TITLE_HEIGHT = 7.8, 17, 14, 34
PAPER, BAR, INK, DOTS = "#0f1720", "#1c2733", "#d7dfe7", ("#b3402a", "#c9a227", "#2e7d4f")


async def record(command: Sequence[str], folder: Path) -> list[list[str]]:
    """Run a command in a terminal of its own; return the rows of its screen every half second, and at its end."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {Path(command[0]).name} {' '.join(command[1:])}\r\n".encode())
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        try:
            stream.feed(os.read(ours, 65_536))
        except OSError:  # Linux reports the end of a terminal this way
            loop.remove_reader(ours)
            ended.set()

    loop.add_reader(ours, read)
    frames: list[list[str]] = []
    while not ended.is_set():
        await asyncio.wait([asyncio.create_task(ended.wait())], timeout=FRAME_S)
        frames.append([row.rstrip() for row in screen.display])
    if code := await process.wait():
        sys.exit(f"{' '.join(command)} ended with exit code {code}")
    return frames


def draw(frames: Sequence[Sequence[str]], title: str) -> str:
    """Return the frames as an SVG that plays them: a strip of all frames that moves up behind a window."""
    height = ROWS * CELL_HEIGHT + 2 * MARGIN
    width = round(COLUMNS * CELL_WIDTH + 2 * MARGIN)
    size = f'{width} {height + TITLE_HEIGHT}" width="{width}" height="{height + TITLE_HEIGHT}'
    seconds = FRAME_S * len(frames) + LAST_FRAME_S
    moves = "".join(
        f"{100 * number * FRAME_S / seconds:.2f}%{{transform:translateY({-number * height}px)}}"
        for number in range(len(frames))
    )
    last = f"translateY({-(len(frames) - 1) * height}px)"
    rows = [
        f'<text x="{MARGIN}" y="{frame * height + MARGIN + (row + 0.75) * CELL_HEIGHT:g}" '
        f'textLength="{len(text) * CELL_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        for frame, shown in enumerate(frames)
        for row, text in enumerate(shown)
        if text
    ]
    dots = [f'<circle cx="{20 + 18 * at}" cy="17" r="5" fill="{colour}"/>' for at, colour in enumerate(DOTS)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">',
            f"<title>{escape(title)}</title>",
            "<style>",
            f"text{{font:13px ui-monospace,'DejaVu Sans Mono',monospace;fill:{INK};white-space:pre}}",
            f".strip{{transform:{last};animation:play {seconds:g}s step-end infinite}}",
            f"@keyframes play{{{moves}100%{{transform:{last}}}}}",
            "@media (prefers-reduced-motion:reduce){.strip{animation:none}}",
            "</style>",
            f'<rect width="{width}" height="{height + TITLE_HEIGHT}" rx="8" fill="{PAPER}"/>',
            f'<path d="M0 {TITLE_HEIGHT} V8 a8 8 0 0 1 8 -8 h{width - 16} a8 8 0 0 1 8 8 v26 z" fill="{BAR}"/>',
            *dots,
            f'<text x="{width / 2:g}" y="22" text-anchor="middle">{escape(title)}</text>',
            f'<svg y="{TITLE_HEIGHT}" width="{width}" height="{height}"><g class="strip">',
            *rows,
            "</g></svg>",
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Record the demo of this environment."""
    program = Path(sys.executable).with_name("edgeasync")
    with tempfile.TemporaryDirectory(prefix="edgeasync-") as folder:
        frames = asyncio.run(record([str(program), "demo"], Path(folder)))
    PICTURE.write_text(draw(frames, "edgeasync demo"), "utf-8")


if __name__ == "__main__":
    main()
