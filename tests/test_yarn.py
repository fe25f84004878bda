"""Reading densely in a window that YaRN stretches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import inline_reader  # noqa: F401
import pytest
import tiny
import torch
from last_event import last_event

from longread.config import Settings
from longread.errors import UsageError
from longread.events import Answer, Opened
from longread.model import Decoder
from longread.policies import Dense
from longread.rope import stretched, yarn_factor
from longread.session import Session
from longread.weights import load_config, load_weights

CONSTITUTION = Path(__file__).parent.parent / "sample_docs" / "us_constitution.txt"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": tiny.WINDOW,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": tiny.WINDOW // 2,
}


def _converted(root: Path, family: str, **overrides: object) -> Path:
    return tiny.convert(tiny.save_hf_folder(root / "hf", family, **overrides), root / "models")


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_stretched_model_is_one_that_was_made_with_yarn(tmp_path: Path, family: str) -> None:
    plain = _converted(
        tmp_path / "plain", family, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    made = _converted(tmp_path / "yarn", family, rope_parameters=YARN)
    config, expected = stretched(load_config(plain), 4)[0], load_config(made)
    assert config.window == expected.window == 4 * tiny.WINDOW
    assert config.attention_scaling == expected.attention_scaling > 1
    ids = torch.randint(0, 400, (200,), generator=torch.Generator().manual_seed(1))
    logits = []
    for path, stretch in ((plain, 4), (made, 1), (plain, 1)):
        decoder = Decoder.load(path, "cpu", "float32", stretch=stretch)
        logits.append(decoder.extend(ids, decoder.new_cache(200), Dense()))
    torch.testing.assert_close(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], rtol=1e-2)


def test_a_model_with_yarn_of_its_own_gets_more_of_it(tmp_path: Path) -> None:
    made = _converted(tmp_path, "qwen3", rope_parameters=YARN)
    config, inv_freq = stretched(load_config(made), 2)
    assert config.window == 8 * tiny.WINDOW
    assert config.rope_parameters["factor"] == 8.0
    assert config.rope_parameters["original_max_position_embeddings"] == tiny.WINDOW
    own = load_weights(made, device="cpu", dtype=torch.float32)["inv_freq"]
    torch.testing.assert_close(inv_freq[-1], own[-1] / 2)
    torch.testing.assert_close(inv_freq[0], own[0])


def test_the_window_grows_by_a_power_of_two(tmp_path: Path) -> None:
    config = load_config(_converted(tmp_path, "llama"))
    lengths = (1, tiny.WINDOW, tiny.WINDOW + 1, 2 * tiny.WINDOW, 3 * tiny.WINDOW)
    assert [yarn_factor(config, length) for length in lengths] == [1, 1, 2, 2, 4]


def test_a_scaling_that_yarn_cannot_replace_is_refused(tmp_path: Path) -> None:
    config = load_config(_converted(tmp_path, "llama", rope_parameters=LLAMA3))
    assert yarn_factor(config, config.window) == 1
    with pytest.raises(UsageError, match="the scaling 'llama3' already; .*--context select"):
        yarn_factor(config, config.window + 1)


@pytest.mark.parametrize("policy", ("tokenselect", "dense"))
def test_a_session_reads_on_with_yarn_and_says_so(
    tmp_path: Path, settings: Settings, policy: str
) -> None:
    model = str(_converted(tmp_path, "qwen2"))
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text()[:5000])
    settings = replace(settings, model=model, max_tokens=8, context="yarn", policy=policy)
    notices: list[str] = []
    session = Session(settings)
    opened = last_event(session.open([str(document)]), notices)
    assert isinstance(opened, Opened) and tiny.WINDOW < opened.cache.tokens_prefilled
    assert any("YaRN makes 4 times longer" in text and "1,024" in text for text in notices)
    answer = last_event(session.ask("When was Amendment XXVII ratified?"))
    assert isinstance(answer, Answer) and answer.usage.answer_tokens > 0
    reopened = last_event(Session(settings).open([str(document)]))
    assert isinstance(reopened, Opened) and reopened.cache.hit
    longer_answers = replace(settings, max_tokens=4 * tiny.WINDOW)
    opened = last_event(Session(longer_answers).open([str(document)]))
    assert isinstance(opened, Opened) and not opened.cache.hit, "another factor, another entry"
