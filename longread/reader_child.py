"""The process that reads a document for another one: JSON lines in and out, within limits.

Owns the child's side of the talk that reader_pool.py begins. It imports no torch, so that it starts
in a tenth of a second; what a hostile file does to it ends with it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from longread import formats
from longread.errors import DocumentError
from longread.pdf_file import PdfFile, UnreadableError, reason
from longread.pdf_highlights import Quote, check_can_be_copied, highlighted
from longread.pdf_pdfium import LockedError


def main() -> None:
    """Serve one file until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this process
    replies = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not get among the replies.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    jobs = open(0, "rb")
    header = json.loads(jobs.readline())
    _limit(header["memory"], header["cpu_s"])
    data = jobs.read(header["length"])
    if len(data) == header["length"]:
        serve(data, jobs, replies)
    replies.flush()
    os._exit(0)  # without the libraries' own clean-up, which a damaged file may break


def serve(data: bytes, jobs: BinaryIO, replies: BinaryIO) -> None:
    """Answer each job with one line."""
    file: PdfFile | None = None
    for line in jobs:
        job = json.loads(line)
        try:
            if job["do"] == "open":
                file = PdfFile(data, job["password"], quick=job.get("quick", False))
                reply = {
                    "state": "open",
                    "num_pages": file.num_pages,
                    "labels": file.labels,
                    "repaired": file.repaired,
                }
            elif job["do"] == "sections":
                found, warnings = formats.parse(
                    job["kind"], data, job["source"], job["max_unpacked"]
                )
                sections = [(section.heading, section.text) for section in found]
                reply = {"state": "read", "sections": sections, "warnings": warnings}
            elif job["do"] == "highlight":
                reply = {"state": "written"} | _highlight(data, job["quotes"])
            else:
                assert file is not None, "a page before the file is open"
                reply = vars(file.read(job["page"], job["first"])) | {"state": "read"}
        except LockedError:
            reply = {"state": "locked"}
        except DocumentError as exc:
            reply = {"state": "refused", "reason": str(exc)}
        except MemoryError:
            reply = {"state": "failed", "reason": "it takes too much memory"}
        except UnreadableError as exc:
            reply = {"state": "failed", "reason": str(exc)}
        except Exception as exc:
            reply = {"state": "failed", "reason": reason(exc)}
        _send(replies, reply)


def _highlight(data: bytes, quotes: list[tuple[int, str, str]] | None) -> dict[str, Any]:
    """Make the copy, or without quotes only see whether one can be made."""
    if quotes is None:
        check_can_be_copied(data)
        return {}
    copy, found = highlighted(data, [Quote(*quote) for quote in quotes])
    return {"copy": base64.b64encode(copy).decode(), "found": found}


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _limit(memory: int, cpu_s: int) -> None:
    """Limit this process, where the system can: bytes of address space, seconds of work."""
    if sys.platform == "win32":
        return
    import resource

    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))
