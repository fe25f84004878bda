"""Run a command in a terminal of its own and draw what it showed as an SVG.

    python scripts/record_terminal.py docs/terminal.svg longread ask \
        sample_docs/us_constitution.pdf "When was Amendment XXVII ratified?" --pages 12

Lines that a progress bar wrote over are left out, as a reader of the terminal sees them last.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 96
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")  # what is not a colour

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # which a viewer would fetch


def shown_by(command: list[str]) -> str:
    """What the command left on a terminal of COLUMNS columns, with its colours."""
    raw = bytearray()
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "60"}
    pid, fd = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    with suppress(OSError):  # what Linux says when the other side has closed
        while data := os.read(fd, 1 << 16):
            raw += data
    os.waitpid(pid, 0)
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    text = _MOVES.sub("", text)
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))


def main() -> int:
    path, *command = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(shown_by(command)))
    svg = _FONTS.sub("", console.export_svg(title="longread"))
    Path(path).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
