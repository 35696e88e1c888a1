"""Record commands in a terminal as an animated SVG: `record_demo.py OUT.svg [COMMAND ...]`, by default those of README.

Each command really runs, in a pseudo-terminal and a new directory that has this repository's docs/. Pauses of more than
a second are cut to one. Nothing else is edited. Viewers that prefer reduced motion see the last picture.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import html
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "forebay prepare docs/ --out my-dataset --tokenizer train:2048",
    "python -c 'import forebay; print(forebay.Loader(\"my-dataset\", seq_len=512, batch_size=8).describe())'",
    "forebay demo --keep demo",
    "forebay ledger verify demo/state/ledger.jsonl",
)
COLUMNS, ROWS = 100, 26
MAX_PAUSE_S, TYPING_S, AFTER_S, END_S = 1.0, 0.035, 1.2, 6.0
PROMPT = "$ "
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")


class Screen:
    """Lines of a terminal that knows line feed and carriage return, and the times at which they changed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines, self.column = [""], 0
        self.frames: list[tuple[float, list[str]]] = []

    def write(self, text: str) -> None:
        for character in _ESCAPES.sub("", text):
            if character == "\n":
                self.lines.append("")
                self.column = 0
            elif character == "\r":
                self.column = 0
            elif character >= " ":
                if self.column == COLUMNS:
                    self.lines.append("")
                    self.column = 0
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1
        self.frames.append((self.now_s, [line.rstrip() for line in self.lines[-ROWS:]]))


def record(screen: Screen, command: str, directory: Path) -> None:
    """Type a command, run it, and show what it prints at the times at which it does."""
    screen.write(PROMPT)
    for character in command:
        screen.now_s += TYPING_S
        screen.write(character)
    screen.now_s += 0.4
    screen.write("\n")
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=directory, stdin=child, stdout=child, stderr=child, start_new_session=True
    )
    os.close(child)
    last, decoder = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if not ready and process.poll() is None:
            continue
        try:
            data = os.read(terminal, 65536) if ready else b""
        except OSError:  # The other side is closed.
            data = b""
        if not data:
            break
        now = time.monotonic()
        screen.now_s += min(now - last, MAX_PAUSE_S)
        last = now
        screen.write(decoder.decode(data))
    os.close(terminal)
    if process.wait() != 0:
        sys.exit(f"record: {command}: exit status {process.returncode}\n" + "\n".join(screen.lines[-ROWS:]))
    screen.now_s += AFTER_S


def render(screen: Screen) -> str:
    """The SVG: a text element for each line and the time in which it stands there."""
    total_s = screen.now_s + END_S
    spans: list[tuple[int, str, float, float]] = []  # Row, text, begin and end.
    shown: dict[int, tuple[str, float]] = {}
    for at, lines in [*screen.frames, (total_s, [])]:
        for row in range(ROWS):
            text = lines[row] if row < len(lines) else ""
            before, since = shown.get(row, ("", 0.0))
            if text != before or at == total_s:
                if before and at > since:
                    spans.append((row, before, since, at))
                shown[row] = (text, at)
    width, height = COLUMNS * 8 + 32, ROWS * 19 + 48
    keyframes, texts = [], []
    for number, (row, text, begin, end) in enumerate(spans):
        first, last = 100 * begin / total_s, 100 * end / total_s
        stops = f"0%{{visibility:hidden}}{first:.3f}%{{visibility:visible}}"
        is_last = end >= total_s
        stops += "" if is_last else f"{last:.3f}%{{visibility:hidden}}"
        keyframes.append(f"@keyframes k{number}{{{stops}}}#t{number}{{animation-name:k{number}}}")
        style = "p" if text.startswith(PROMPT) else "o"
        final = " z" if is_last else ""
        texts.append(
            f'<text id="t{number}" class="{style}{final}" x="16" y="{52 + 19 * row}">{html.escape(text)}</text>'
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A terminal in which these commands run: {html.escape("; ".join(COMMANDS))}</title>
<style>text{{font:13.2px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;
visibility:hidden;animation:{total_s:.2f}s step-end infinite}}.o{{fill:#d5dbe3}}.p{{fill:#7fd6c2}}
{"".join(keyframes)}
@media (prefers-reduced-motion:reduce){{text{{animation:none!important}}.z{{visibility:visible}}}}</style>
<rect width="{width}" height="{height}" rx="8" fill="#14181f"/>
<circle cx="20" cy="18" r="5" fill="#e06c60"/><circle cx="38" cy="18" r="5" fill="#e0b44c"/>
<circle cx="56" cy="18" r="5" fill="#67b868"/>
{chr(10).join(texts)}
</svg>
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("commands", nargs="*", default=COMMANDS)
    args = arguments.parse_args()
    screen = Screen()
    with tempfile.TemporaryDirectory(prefix="forebay-record-") as directory:
        shutil.copytree(ROOT / "docs", Path(directory, "docs"))
        for command in args.commands:
            record(screen, command, Path(directory))
        screen.write(PROMPT)
    args.out.write_text(render(screen), "utf-8")
    print(f"{args.out}: {len(screen.frames)} frames, {screen.now_s:.0f} s, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
