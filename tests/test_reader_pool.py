"""Child processes: limits, crashes, interruption, threads; none is ever left behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_pdf import PDF, make_writer, raw_document, show, to_bytes

from longread import reader_pool
from longread.document import extract
from longread.errors import DocumentError, InterruptedByUser
from longread.events import Progress

SCRIPTS = Path(__file__).parent.parent / "scripts"


def children() -> list[str]:
    """The children of this process, dead ones that nobody waited for among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[1] == str(os.getpid()):
            found.append(path.parent.name)
    return found


@pytest.fixture(autouse=True)
def no_child_stays() -> Iterator[None]:
    before = children()
    yield
    assert sorted(children()) == sorted(before)


def many_pages(number: int) -> bytes:
    return to_bytes(make_writer(show(f"This is page {i}.") for i in range(1, number + 1)))


def test_pages_come_in_order_from_several_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "_num_cpus", lambda: 3)
    seen: list[Progress] = []
    document = extract(raw_document(many_pages(80)), progress=seen.append)
    assert [page.text for page in document.pages] == [f"This is page {i}." for i in range(1, 81)]
    assert [event.done for event in seen] == list(range(81))


def test_a_child_that_is_too_slow_is_ended_and_the_page_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A content stream that takes pypdf minutes; pypdfium2 has it at once.
    content = b"BT /F1 12 Tf 72 700 Td " + b"(a) Tj 1 0 Td " * 400_000 + b"ET"
    writer = make_writer([show("First page"), content, show("Third page")])
    monkeypatch.setattr(reader_pool, "PAGE_LIMIT_S", 1.5)
    start = time.monotonic()
    document = extract(raw_document(to_bytes(writer)))
    assert time.monotonic() - start < 15
    first, slow, third = document.pages
    assert (first.text, third.text) == ("First page", "Third page")
    assert slow.engine != "pypdf"


def test_a_crash_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "_CODE", "import os; os.abort()")
    with pytest.raises(DocumentError, match="the reader crashed on it") as caught:
        extract(raw_document(PDF))
    assert caught.value.exit_code == 3


def test_an_open_that_hangs_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "_CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(reader_pool, "OPEN_LIMIT_S", 0.3)
    with pytest.raises(DocumentError, match="it took more than 0 s"):
        extract(raw_document(PDF))


def test_a_page_that_needs_too_much_memory_does_not_take_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_pool, "MEMORY_LIMIT", 600 << 20)
    monkeypatch.setattr(reader_pool, "PAGE_LIMIT_S", 1.0)
    import zlib

    from pypdf.generic import NameObject

    writer = make_writer([show("First page"), b"x", show("Third page")])
    stream = writer.pages[1]["/Contents"]
    bomb = zlib.compressobj(1)
    data = b"".join(bomb.compress(b" " * (1 << 24)) for _ in range(64)) + bomb.flush()
    stream.set_data(data)  # type: ignore[attr-defined]
    stream[NameObject("/Filter")] = NameObject("/FlateDecode")  # type: ignore[index]
    document = extract(raw_document(to_bytes(writer)))
    assert [page.text for page in document.pages][::2] == ["First page", "Third page"]
    assert document.warnings


def test_reading_in_a_thread_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "_CODE", "import time; time.sleep(60)")
    raised: list[BaseException] = []

    def read() -> None:
        try:
            extract(raw_document(PDF))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.3)
    # As longread.live does on Ctrl-C.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(InterruptedByUser)
    )
    thread.join(timeout=5)
    assert not thread.is_alive() and isinstance(raised[0], InterruptedByUser)
    assert not [t for t in threading.enumerate() if t.name.startswith("longread-reader")]


def test_fifty_mutated_files_end_in_text_or_one_line(evaldata: Path) -> None:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import mutate_pdf
    finally:
        sys.path.remove(str(SCRIPTS))
    outcomes = set()
    for kind, path, data in mutate_pdf.mutations(evaldata, 50, seed=7):
        outcome, problem = mutate_pdf.read(data)
        outcomes.add(outcome)
        assert problem is None, f"{kind} of {path.name}: {problem}"
    assert {"text", "code 3"} <= outcomes


def test_an_interrupt_in_the_middle_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "_num_cpus", lambda: 2)

    def stop(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(raw_document(many_pages(60)), progress=stop)


def test_the_child_imports_no_torch_and_stops_when_its_parent_is_gone() -> None:
    code = (
        "import sys, longread.reader_child; print('torch' in sys.modules, 'pypdf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[0] == "False"
    command = [sys.executable, "-P", "-c", reader_pool._CODE, reader_pool._PACKAGE_PARENT]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert child.stdin is not None
    child.stdin.write(b'{"length": 4, "memory": 1000000000, "cpu_s": 60}\n%PDF')
    child.stdin.close()
    assert child.wait(timeout=20) == 0


def test_memory_of_a_long_file_is_bounded(evaldata: Path) -> None:
    code = (
        "import resource, sys\n"
        "from longread.document import extract, read_source\n"
        "document = extract(read_source(sys.argv[1]))\n"
        "status = open('/proc/self/status').read()\n"
        "own = int(status.split('VmHWM:')[1].split()[0])\n"  # ru_maxrss has pytest's in it
        "child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(len(document.pages), own, child)"
    )
    source = str(evaldata / "pdfs/generated/gen_1500_pages.pdf")
    command = [sys.executable, "-c", code, source]
    num_pages, own, child = map(int, subprocess.check_output(command).split())
    # Kibibytes; at most four children.
    assert num_pages == 1500 and own + 4 * child < 1_000_000_000 // 1024
