"""Write the help texts of all commands into README.md, between its two marks.

`python scripts/readme_help.py` writes, `--check` only says whether the file is up to date (exit
code 1 if not). A test holds the same.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import typer

from longread.cli import app

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- help: written by scripts/readme_help.py -->\n"
END = "<!-- end of help -->\n"
WIDTH = 88
COMMANDS = (
    "",
    "ask",
    "chat",
    "ingest",
    "inspect",
    "cache",
    "cache verify",
    "cache prune",
    "models",
    "models pull",
    "sessions",
    "sessions export",
    "butler",
    "butler train",
    "butler info",
    "config",
    "doctor",
    "eval",
    "bench",
    "bench ask",
    "bench prefill",
    "bench decode",
    "bench weights",
    "bench questions",
    "bench load",
    "bench pages",
)


def help_text(words: str) -> str:
    """Return what `longread WORDS --help` prints on a terminal of WIDTH columns."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        typer.main.get_command(app).main(
            [*words.split(), "--help"],
            prog_name="longread",
            standalone_mode=False,
            terminal_width=WIDTH,
        )
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines()) + "\n"


def help_section() -> str:
    """Return the section as it stands in the README, marks included."""
    parts = [BEGIN, "\n"]
    for words in COMMANDS:
        title = " ".join(["longread", *words.split(), "--help"])
        parts.append(f"<details><summary><code>{title}</code></summary>\n\n")
        parts.append(f"```text\n{help_text(words)}```\n\n</details>\n\n")
    return "".join([*parts, END])


def with_help(readme: str) -> str:
    """Return the README's text with the section renewed."""
    head, _, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{README} lacks the marks of the help section"
    return head + help_section() + tail


def main() -> int:
    old = README.read_text(encoding="utf-8")
    new = with_help(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
