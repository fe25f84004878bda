"""What all tests share: isolation from the user's settings, the real models, the markers' rules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from longread.config import Settings

REPO = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--weights-all",
        action="store_true",
        help="run the tests that need the 0.5B and 1.5B models as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Triton reads its interpreter's switch when a kernel is defined, so it is set before that."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--weights-all"):
        skip_large = pytest.mark.skip(reason="needs --weights-all")
        for item in items:
            if item.get_closest_marker("weights_all"):
                item.add_marker(skip_large)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def isolation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's settings, cache and sessions out; the models directory stays the real one."""
    kept = ("LONGREAD_MODELS_DIR", "LONGREAD_EVALDATA")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("LONGREAD_") and name not in kept:
                patch.delenv(name)
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
            patch.delenv(name, raising=False)
        for name in ("CACHE", "SESSIONS"):
            patch.setenv(f"LONGREAD_{name}_DIR", str(tmp_path_factory.mktemp(name.lower())))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def evaldata() -> Path:
    """The real documents and questions, where LONGREAD_EVALDATA names them."""
    value = os.environ.get("LONGREAD_EVALDATA")
    if not value:
        pytest.skip("needs LONGREAD_EVALDATA")
    return Path(value)


def _model_dir(name: str) -> Path:
    from longread.config import load_settings
    from longread.weights import prepare

    models_dir = load_settings({}).settings.models_dir
    return prepare(name, models_dir, lambda progress: None, lambda notice: None)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted smollm2-135m, fetched through the catalogue at first use."""
    return _model_dir("smollm2-135m")


@pytest.fixture(scope="session")
def qwen05_dir() -> Path:
    """The converted qwen2.5-coder-0.5b; for tests marked weights_all."""
    return _model_dir("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen15_dir() -> Path:
    """The converted qwen2.5-coder-1.5b; for tests marked weights_all."""
    return _model_dir("qwen2.5-coder-1.5b")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that the runner supports; CUDA where there is a GPU."""
    return request.param


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a window of 16,384 tokens, converted."""
    import tiny

    root = tmp_path_factory.mktemp("tiny")
    folder = tiny.save_hf_folder(root / "hf", "qwen2", max_position_embeddings=16384)
    return tiny.convert(folder, root / "models")


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path) -> Settings:
    """Settings of a session on the tiny model, with directories of the test's own."""
    return Settings(
        model=str(model_dir),
        dtype="float32",
        cache_dir=tmp_path / "cache",
        models_dir=tmp_path / "models",
        max_tokens=6,
        window_size=16,
    )
