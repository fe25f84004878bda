"""How documents are read: with dense attention, by selection where they pass the model's window, or
in a window that YaRN stretches; and which policies can answer from what was read by selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longread import past_window, rope
from longread.config import Settings
from longread.errors import UsageError
from longread.events import Notice
from longread.model import Decoder
from longread.past_window import Reading
from longread.policies import Butler, Policy, TokenSelect, make_policy
from longread.prompt import ChatFormat, TokenizedDocument, build_prompt
from longread.tokenizer import Tokenizer
from longread.weights import ModelConfig

QUESTION_RESERVE = 256  # tokens kept free for the question and the template around it


def rows_for(settings: Settings, config: ModelConfig, num_rows: int) -> int:
    """Rows of a cache for documents of `num_rows` rows and the first two questions and answers."""
    reserve = QUESTION_RESERVE + settings.max_tokens
    return min(config.window, num_rows + 2 * reserve)


@dataclass(frozen=True)
class Way:
    """How documents are read: by selection, or densely in a window that YaRN stretches."""

    reading: Reading | None = None
    stretch: int = 1

    @property
    def selects(self) -> bool:
        return self.reading is not None

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config of a model that reads so."""
        if self.selects:
            return past_window.widened(config)
        return rope.stretched(config, self.stretch)[0] if self.stretch > 1 else config


def way_to_read(
    settings: Settings,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    tokenized: Sequence[TokenizedDocument],
    config: ModelConfig,
) -> Way:
    """By selection where it is asked for, or where the documents pass the window.

    With `truncate` they are cut to the window instead, but for yarn, which stretches it. Raises
    UsageError where a policy other than tokenselect is asked for as well, or where YaRN cannot be
    had.
    """
    can_select = settings.policy == "tokenselect"
    reading = Reading().fitting(config.window)
    if settings.context == "select" and not can_select:
        raise UsageError(
            f"--context select reads by selection, which --policy {settings.policy} cannot go on "
            "with: leave one of the two out"
        )
    if settings.context in ("dense", "select"):
        return Way(reading if settings.context == "select" else None)
    reserve = QUESTION_RESERVE + settings.max_tokens
    num_needed = len(build_prompt(tokenizer, chat, tokenized).token_ids) + reserve
    if settings.context == "yarn":
        return Way(stretch=rope.yarn_factor(config, num_needed))
    if not can_select or settings.truncate or reserve > config.window // 2:
        return Way()  # what is too long is refused, or cut; or it is the answer that is too long
    return Way(reading if num_needed > config.window else None)


def reading_notice(
    settings: Settings, way: Way, decoder: Decoder, num_tokens: int
) -> Notice | None:
    """What a user is told whose documents are not read with plain dense attention."""
    if settings.context == "select":
        return Notice(f"{num_tokens:,} tokens are read by selection (--context select)", "info")
    window = decoder.trained_window // way.stretch
    trained = f"{decoder.config.name} was trained for {window:,}"
    if way.selects:
        return Notice(f"{num_tokens:,} tokens are read by selection: {trained}")
    if way.stretch > 1:
        return Notice(
            f"{num_tokens:,} tokens are read in a window that YaRN makes {way.stretch} times "
            f"longer: {trained}"
        )
    return None


def answering_policy(settings: Settings, decoder: Decoder, num_rows: int) -> Policy:
    """The policy of the settings for documents of `num_rows` rows, as the decoder has read them.

    What it reads past the window must fit into the window: a budget that is a share counts from no
    more rows than that, and is at most what reading chose (with more, answers were worse:
    docs/quality.md). Raises UsageError for what cannot answer so.
    """
    if not decoder.is_past_window:
        policy = make_policy(settings, num_rows)
        if isinstance(policy, Butler):  # what is missing is told before documents are read
            policy.load(decoder.config.name, decoder.config.identity)
        return policy
    window = decoder.trained_window
    policy = make_policy(settings, min(num_rows, window), decoder.most_of_share)
    if not isinstance(policy, TokenSelect):
        raise UsageError(f"--policy {settings.policy} cannot answer past the model's window")
    room = window - QUESTION_RESERVE - settings.max_tokens
    if policy.budget is None or policy.sink_size + policy.window_size + policy.budget > room:
        raise UsageError(
            f"past the window of {window:,} tokens an answer can read {room:,} rows, the first and "
            f"the last ones among them: give a smaller budget than {settings.budget}, at most "
            f"{max(room - policy.sink_size - policy.window_size, 0)}"
        )
    return policy
