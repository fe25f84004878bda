"""The house rules that can be read off the source: layers, environment, printing, sizes."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO

# A file imports only from lower layers, or from its own without cycles. A folder stands for all
# files in it.
LAYERS = (
    "errors values config events plain_text disk memory questions",
    "document page_ranges reading formats sections html_text epub docx_text textfile normalize "
    "running completeness page_choice page_edits typeset contents continued "
    "pdf reader_child pdf_fields pdf_file pdf_highlights pdf_layout pdf_marks pdf_pdfium pdf_pypdf "
    "pdf_repair reader_pool tokenizer tokenizer_files tokenizer_tables tiktoken_bpe vocabulary "
    "normal_form catalog hub wheels model_files",
    "prompt chat_format "
    "store atomic block entry inventory locks manifest pinned prefix records space store_dirs "
    "tensorfile weights convert gguf_model gguf_reader hf_model model_config quantize rope",
    "cache index",
    "policies",
    "attention device matrix network packed past_window sampling step_buffers trace",
    "evidence heat model captured decode_graph reread",
    "session reply grounds batch branches side_by_side context ingest live history",
    "render progress selection_view strip schema conversation output_file answer_lines transcript "
    "report report_html report_pdf checkup bench evaluate butler",
    "repl line_input cli commands __main__",
)
KERNEL_USERS = 3  # the lowest layer that may import longread_kernels
MAY_READ_ENVIRONMENT = ("config",)
# The child process of a benchmark hands its figures to its parent.
MAY_PRINT = ("render", "repl", "cli", "commands", "__main__", "bench.prefill")
MAX_LINES = 300

LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
PACKAGE_FILES = sorted((REPO / "longread").rglob("*.py"))
KERNEL_FILES = sorted((REPO / "kernels").glob("*.py"))
ALL_FILES = PACKAGE_FILES + KERNEL_FILES


def module_name(path: Path) -> str:
    """The name below `longread`, dotted; the package itself is "__init__"."""
    parts = path.relative_to(REPO / "longread").with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_name(path): path for path in PACKAGE_FILES}


def in_group(name: str, group: tuple[str, ...]) -> bool:
    return name in group or name.split(".")[0] in group


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever in it the import stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The modules of longread that a file imports, by their names below the package."""
    names = {name.removeprefix("longread.") for name in imported_names(path)}
    return {name for name in names if name in MODULES}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}))
def test_imports_go_down(name: str) -> None:
    top = name.split(".")[0]
    assert top in LAYER_OF, f"give {name} a layer in tests/test_layers.py"
    layer = LAYER_OF[top]
    for imported in imported_modules(MODULES[name]):
        other = LAYER_OF[imported.split(".")[0]]
        assert other <= layer, f"{name} (layer {layer}) imports {imported} (layer {other})"
    if layer < KERNEL_USERS:
        kernels = [n for n in imported_names(MODULES[name]) if n.startswith("longread_kernels")]
        assert not kernels


def test_layers_name_files_that_exist() -> None:
    assert {name.split(".")[0] for name in MODULES} - {"__init__"} == set(LAYER_OF)


def test_no_cycles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            # A package's __init__ collects its files, which import their siblings and not it.
            for imported in imported_modules(MODULES[name]) - {name}:
                visit(imported, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernels_import_no_longread(path: Path) -> None:
    assert not [name for name in imported_names(path) if name.split(".")[0] == "longread"]


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """Every `name.attribute` in a file, and every `from name import attribute`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_environment_is_read_in_one_place(name: str) -> None:
    if not in_group(name, MAY_READ_ENVIRONMENT):
        found = set(attributes(MODULES[name])) & {
            ("os", "environ"),
            ("os", "environb"),
            ("os", "getenv"),
        }
        assert not found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_printing_is_left_to_few(name: str) -> None:
    if in_group(name, MAY_PRINT):
        return
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{name}:{node.lineno} prints"
    streams = set(attributes(MODULES[name])) & {("sys", "stdout"), ("sys", "stderr")}
    assert not streams


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_house_rules_of_a_file(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "a file opens with a docstring"
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES, "it is two nouns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            # `**__` swallows what a foreign caller passes to a stand-in of ours.
            taken = node.args.kwarg is not None and node.args.kwarg.arg != "__"
            assert not taken, f"line {node.lineno} takes **kwargs"
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a global"


def test_packages_are_listed() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for path in PACKAGE_FILES}
    names = {".".join(folder.relative_to(REPO).parts) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == names | {"longread_kernels"}


def test_kernels_stay_a_namespace_folder() -> None:
    # With an __init__.py it would shadow the package `kernels`, which transformers probes for.
    assert not (REPO / "kernels" / "__init__.py").exists()
    assert (REPO / "kernels" / "py.typed").exists()
