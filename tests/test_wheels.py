"""pip as the program sees it: the command line, and failures told without addresses."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from longread import wheels
from longread.errors import ModelError
from longread.wheels import pip_download


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(wheels.sys, "executable", str(path))


def test_pips_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "wheels"
    target.mkdir()
    log = tmp_path / "arguments"
    fake_python(tmp_path, monkeypatch, f'echo "$@" > "{log}"; touch "{target}/toy-1.0.whl"')
    assert pip_download("toy==1.0", target) == target / "toy-1.0.whl"
    arguments = log.read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} <= set(arguments)
    assert arguments[-3:] == ["-d", str(target), "toy==1.0"]


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("ERROR: No matching distribution found for toy==1.0", "does not have it"),
        ("NewConnectionError: https://me:secret@index.example/simple", "not reachable"),
        ("something at https://me:secret@index.example/simple", "by hand"),
    ],
)
def test_pips_failure_tells_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    fake_python(tmp_path, monkeypatch, f"echo '{stderr}' >&2; exit 1")
    with pytest.raises(ModelError, match=reason) as caught:
        pip_download("toy==1.0", tmp_path)
    assert "toy==1.0" in str(caught.value) and "secret" not in str(caught.value)


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no pip.*ensurepip"):
        pip_download("toy==1.0", tmp_path)
