"""The README says what is so: help texts, commands, settings, models, exit codes, JSON fields."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import ModuleType

import pytest
from conftest import REPO
from fake_session import make_answer

from longread.catalog import CATALOG
from longread.config import OPTION_NAMES
from longread.events import Citation, Passage
from longread.repl import COMMANDS
from longread.schema import answer_document

README = (REPO / "README.md").read_text(encoding="utf-8")
TEST_COMMAND = "pip install -e '.[test]' && pytest"
ASK_COMMAND = (
    "pip install -e . && longread ask sample_docs/us_constitution.pdf "
    '"When was Amendment XXVII ratified?"'
)


@pytest.fixture(scope="module")
def readme_help() -> ModuleType:
    path = REPO / "scripts" / "readme_help.py"
    spec = importlib.util.spec_from_file_location("readme_help", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_is_that_of_the_program(readme_help: ModuleType) -> None:
    message = "run `python scripts/readme_help.py`"
    assert readme_help.with_help(README) == README, message


def test_the_first_commands_are_the_two_of_the_issue() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert [block.strip() for block in blocks[:2]] == [ASK_COMMAND, TEST_COMMAND]


def test_ci_runs_the_readmes_test_command() -> None:
    script = (REPO / ".ci" / "run").read_text(encoding="utf-8")
    assert f'test_command="{TEST_COMMAND}"' in script
    assert 'bash -c "$test_command"' in script


def test_every_setting_is_described() -> None:
    table = README.partition("| Setting |")[2].partition("\n\n")[0]
    assert set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    ) == set(OPTION_NAMES)


def test_every_model_is_in_the_table() -> None:
    for source in CATALOG.values():
        row = next(line for line in README.splitlines() if line.startswith(f"| `{source.name}`"))
        assert f"{source.window:,}" in row
        assert source.licence in row


def test_every_json_field_is_described() -> None:
    section = README.partition("## JSON")[2].partition("\n## ")[0]
    document = answer_document("q", make_answer("a"), with_selected=True)
    fields = set(document)
    for value in document.values():
        if isinstance(value, dict):
            fields |= set(value)
    for kind in (Citation, Passage):
        fields |= {field.name for field in dataclasses.fields(kind)}
    missing = [field for field in sorted(fields) if f"`{field}`" not in section]
    assert not missing


def test_every_chat_command_is_named() -> None:
    for command in COMMANDS:
        assert command in README
