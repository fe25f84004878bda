"""Real weights on a GPU: the graph's answers are those of the step in torch operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.model import Decoder
from longread.policies import Dense, Policy, TokenSelect, Turn
from longread.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.weights_all]

NUM_STEPS = 16
TEXT = Path(__file__).parent.parent / "sample_docs" / "us_constitution.txt"


def _logits(
    decoder: Decoder, cache: KVCache, policy: Policy, question: Tensor, answer: Tensor, graph: bool
) -> Tensor:
    """Logits [steps, V] of the answer's tokens after a question, read again from the document."""
    start = cache.length
    policy.prepare(cache)
    policy.start_turn(Turn(start, start + len(question)))
    step = decoder.decode if graph else decoder.decode_with_torch
    logits = [decoder.extend(question, cache, policy).clone()]
    logits += [step(token[None], cache, policy).clone() for token in answer]
    assert bool(len(decoder.captured)) == graph
    cache.truncate(start)
    return torch.stack(logits)


@pytest.mark.parametrize("budget", (None, "20%", "5%"))
def test_the_graph_answers_as_torch_does(qwen05_dir: Path, budget: str | None) -> None:
    decoder = Decoder.load(qwen05_dir, "cuda", "bfloat16")
    tokenizer = Tokenizer.load(qwen05_dir)
    document = torch.tensor(tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    question = torch.tensor(tokenizer.encode("\n\nHow old must a senator be? A senator must be"))
    answer = torch.tensor(
        tokenizer.encode(" at least thirty years of age, and nine years a citizen")
    )
    answer = answer[:NUM_STEPS].to("cuda")
    cache = decoder.new_cache(len(document) + len(question) + NUM_STEPS)
    decoder.prefill(document, cache)

    def policy() -> Policy:
        if budget is None:
            return Dense()
        return TokenSelect(budget=int(len(document) * float(budget.rstrip("%")) / 100))

    expected = _logits(decoder, cache, policy(), question, answer, graph=False)
    found = _logits(decoder, cache, policy(), question, answer, graph=True)
    assert relative_rms(found, expected) < 0.02
    assert (found.argmax(dim=1) == expected.argmax(dim=1)).float().mean() > 0.9
