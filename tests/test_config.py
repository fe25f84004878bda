"""Settings: order of sources, origins, and errors that name the option and the place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longread.config import (
    OPTION_NAMES,
    POLICY_NAMES,
    VOTE_NAMES,
    Budget,
    Settings,
    load_settings,
    option_value,
    parse_budget,
    password,
    user_config_path,
)
from longread.errors import UsageError


@pytest.fixture
def user_file() -> Iterator[Path]:
    path = user_config_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    path.unlink(missing_ok=True)


def test_order_of_sources(tmp_path: Path, user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file.write_text('model = "user"\npolicy = "dense"\nseed = 1\ntop_p = 0.5\n')
    (tmp_path / "longread.toml").write_text('model = "project"\npolicy = "tokenselect"\nseed = 2\n')
    monkeypatch.setenv("LONGREAD_MODEL", "variable")
    monkeypatch.setenv("LONGREAD_SEED", "3")
    resolved = load_settings({"model": "flag", "budget": None}, cwd=tmp_path)
    assert resolved.settings.model == "flag"
    assert resolved.origins["model"] == "--model"
    assert resolved.settings.seed == 3
    assert resolved.origins["seed"] == "LONGREAD_SEED"
    assert resolved.settings.policy == "tokenselect"
    assert resolved.origins["policy"] == str(tmp_path / "longread.toml")
    assert resolved.settings.top_p == 0.5
    assert resolved.origins["top_p"] == str(user_file)
    assert resolved.settings.budget == "20%"
    assert resolved.origins["budget"] == "default"
    assert set(resolved.origins) == set(OPTION_NAMES)


def test_every_setting_has_an_option() -> None:
    settings = Settings()
    assert len(set(OPTION_NAMES)) == len(vars(settings))
    assert option_value(settings, "cache_size") == 20 * 1024**3


def test_every_default_is_a_valid_value() -> None:
    defaults = Settings()
    given = {name: str(option_value(defaults, name)) for name in OPTION_NAMES}
    assert load_settings(given).settings == defaults


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("model", "", "empty"),
        ("policy", "tokenselct", "did you mean tokenselect"),
        ("vote", "x", "group-max"),
        ("min_votes", "0", "from 1"),
        ("seed", "1.5", "whole number"),
        ("seed", "9" * 30, "whole number"),
        ("temperature", "-1", "from 0"),
        ("temperature", "nan", "from 0"),
        ("temperature", "warm", "give a number"),
        ("top_p", "0", "over 0"),
        ("device", "gpu", "cuda:N"),
        ("cache_size", "20 potatoes", "20GB"),
        ("cache_size", "0", "20GB"),
        ("no_wait", "perhaps", "true or false"),
        ("budget", "150%", "up to 100%"),
    ],
)
def test_bad_values_name_option_and_origin(name: str, value: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({name: value})
    message = str(caught.value)
    assert part in message
    assert name in message
    assert f"--{name.replace('_', '-')}" in message
    assert "\n" not in message


def test_bad_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREAD_KV_DTYPE", "fp4")
    with pytest.raises(UsageError, match="LONGREAD_KV_DTYPE"):
        load_settings({})


def test_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREAD_MODEL", "")
    assert load_settings({}).origins["model"] == "default"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("model = ", "not valid TOML"),
        ('modle = "x"', "did you mean model"),
        ('[model]\nname = "x"', "single value"),
        ("seed = true", "whole number"),
        ("budget = 0.0", "budget"),
    ],
)
def test_bad_project_file_names_it(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "longread.toml").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_settings({}, cwd=tmp_path)
    assert part in str(caught.value)
    assert str(tmp_path / "longread.toml") in str(caught.value)


def test_project_file_takes_native_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGREAD_CACHE_DIR")
    text = 'budget = 0.5\nno-wait = true\nthreads = 3\ncache_size = "5 GB"\ncache_dir = "~/c"\n'
    (tmp_path / "longread.toml").write_text(text)
    settings = load_settings({}, cwd=tmp_path).settings
    assert (settings.budget, settings.no_wait, settings.threads) == ("0.5", True, 3)
    assert settings.cache_max_bytes == 5_000_000_000
    assert settings.cache_dir == Path.home() / "c"


def test_unreadable_bytes_in_the_project_file(tmp_path: Path) -> None:
    (tmp_path / "longread.toml").write_bytes(b'model = "\xff"')
    with pytest.raises(UsageError, match="not valid TOML"):
        load_settings({}, cwd=tmp_path)


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="give a directory"):
        load_settings({"cache_dir": str(tmp_path / "f")})


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("f/x", "f is a file; give a directory"),
        ("~no-such-user/x", "no home of ~no-such-user is known"),
        ("a" * 5000, "File name too long"),
        ("a\0b", "NUL"),
    ],
)
@pytest.mark.parametrize("name", ["cache_dir", "models_dir", "sessions_dir"])
def test_directories_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match=part):
        load_settings({name: value})


def test_a_relative_directory_in_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="the working directory is gone"):
        load_settings({"cache_dir": "cache"})


def test_model_in_an_unknown_home() -> None:
    with pytest.raises(UsageError, match="no home of ~no-such-user"):
        load_settings({"model": "~no-such-user/m.gguf"})


def test_nesting_without_end_in_the_project_file(tmp_path: Path) -> None:
    (tmp_path / "longread.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match="not valid TOML"):
        load_settings({}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("512", Budget(tokens=512)),
        ("1", Budget(tokens=1)),
        ("0.2", Budget(fraction=0.2)),
        (".5", Budget(fraction=0.5)),
        ("1.0", Budget(fraction=1.0)),
        ("20%", Budget(fraction=0.2)),
        ("2.5%", Budget(fraction=0.025)),
        ("100%", Budget(fraction=1.0)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "0", "0%", "0.0", "1.5", "101%", "-5", "5 %", "1e3", "x", "٣", "nan", "9" * 40]
)
def test_no_budgets(text: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        parse_budget(text)


def test_budget_resolves_to_rows() -> None:
    assert Budget(tokens=512).resolve(100) == 512  # answers and history may need the rest
    assert Budget(tokens=512).resolve(1000) == 512
    assert Budget(fraction=1.0).resolve(999) is None
    assert Budget(fraction=0.01).resolve(5) == 1
    # 7 % of 100 is 7.000000000000001 in binary.
    assert Budget(fraction=0.07).resolve(100) == 7
    assert Budget(fraction=0.2).resolve(1001) == 201


def test_password_comes_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert password() is None
    monkeypatch.setenv("LONGREAD_PASSWORD", "secret")
    assert password() == "secret"


def test_policy_names_are_the_table_of_policies() -> None:
    from longread.policies import POLICIES

    assert set(POLICY_NAMES) == set(POLICIES)


def test_vote_names_are_the_votes_of_the_kernels() -> None:
    from longread_kernels.reference import VOTES

    assert VOTE_NAMES == VOTES
