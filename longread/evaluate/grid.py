"""Many cells in one run: every task at every length, each sample under all variants at once.

Owns the order of the work and what of it is already there. The n-th samples of all tasks come
before any task's next one, so that a run that is stopped has about as many samples of each.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from longread import __version__
from longread.errors import ContextError, UsageError
from longread.evaluate.cells import Cell, CellFolder, CellKey, Result
from longread.evaluate.runner import Prompt, Prompts, Runner, Said
from longread.evaluate.task import ANSWER_ROOM, Question, Sample, Task
from longread.evaluate.variants import Variant
from longread.events import Notice, NoticeFn, Progress, ProgressFn
from longread.model import Decoder
from longread.prompt import ChatFormat
from longread.tokenizer import Tokenizer

_WRITE_INTERVAL_S = 5.0
_WORK_PER_WRITE = 50  # times as long as the last write took, where that is more


@dataclass(frozen=True)
class Request:
    """What is to be there in the end. limit_s: begin no sample after so many seconds."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    variants: tuple[Variant, ...]
    num_samples: int
    seed: int
    limit_s: float | None = None
    command: str = ""


@dataclass
class Outcome:
    """The cells that were asked for, as far as they are there, and how the run went."""

    cells: list[Cell]
    num_done: int = 0  # samples of this run
    num_missing: int = 0
    times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    task: Task
    number: int
    variants: tuple[Variant, ...]


class Grid:
    """Fills the cells of a folder with one model."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        folder: CellFolder,
        progress: ProgressFn,
        notice: NoticeFn,
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._chat = chat
        self._folder = folder
        self._progress = progress
        self._notice = notice
        self._prompts = Prompts(tokenizer, chat)

    def run(self, request: Request) -> Outcome:
        """Answer what the folder lacks. A task's samples end where it has no more.

        Raises UsageError where no task has a sample of any length.
        """
        started = time.perf_counter()
        keys = [
            self._key(task, length, variant, request.seed)
            for length in request.lengths
            for task in request.tasks
            for variant in request.variants
        ]
        outcome = Outcome([])
        times = {"waiting_s": 0.0, "prefill_s": 0.0, "questions_s": 0.0, "answers_s": 0.0}
        with self._folder.locked():
            try:
                for length in request.lengths:
                    self._run_length(request, length, started, outcome, times)
            except KeyboardInterrupt:
                self._notice(Notice("interrupted; what was answered is stored for the next run"))
                raise
        outcome.cells = [cell for key in keys if (cell := self._folder.cell(key)).results]
        outcome.times = times | {"total_s": time.perf_counter() - started}
        if not outcome.cells and not outcome.num_missing:
            raise UsageError("no task has a sample of these lengths; see the lines above")
        return outcome

    def _run_length(
        self,
        request: Request,
        length: int,
        started: float,
        outcome: Outcome,
        times: dict[str, float],
    ) -> None:
        works = self._missing(request, length)
        outcome.num_missing += len(works)
        if not works or (outcome.num_done and _is_late(request, started)):
            return
        runner = Runner(self._decoder, self._tokenizer, request.variants, length)
        run = self._run_record(request.command)
        num_seen = 0
        too_long: set[str] = set()
        asked = time.perf_counter()
        write_at = asked + _WRITE_INTERVAL_S
        for work, prompt in self._prompts_ahead(works, length, request.seed):
            times["waiting_s"] += time.perf_counter() - asked
            num_seen += 1
            if prompt is not None and work.task.name not in too_long:
                try:
                    said = runner.answers(prompt, work.variants)
                except ContextError as error:
                    too_long.add(work.task.name)
                    self._notice(Notice(f"{work.task.name} at {length:,}: {error}"))
                    said = {}
                for variant, answers in said.items():
                    key = self._key(work.task, length, variant, request.seed)
                    self._folder.add(key, _result(prompt.sample, answers), run)
                outcome.num_done += bool(said)
            self._progress(Progress(f"evaluating at {length:,}", num_seen, len(works), "samples"))
            asked = time.perf_counter()
            if asked > write_at:
                self._folder.write()
                began, asked = asked, time.perf_counter()
                write_at = asked + max(_WRITE_INTERVAL_S, _WORK_PER_WRITE * (asked - began))
            if _is_late(request, started):
                break
        self._folder.write()
        outcome.num_missing -= num_seen
        for name in ("prefill_s", "questions_s", "answers_s"):
            times[name] += getattr(runner.times, name)

    def _missing(self, request: Request, length: int) -> list[_Work]:
        works = []
        for number in range(request.num_samples):
            for task in request.tasks:
                variants = tuple(
                    variant
                    for variant in request.variants
                    if number not in self._cell(task, length, variant, request.seed).results
                )
                if variants:
                    works.append(_Work(task, number, variants))
        return works

    def _prompts_ahead(
        self, works: Sequence[_Work], length: int, seed: int
    ) -> Iterator[tuple[_Work, Prompt | None]]:
        """Each work's prompt, None where its task has no more; the next is made meanwhile.

        Only the thread that makes prompts encodes.
        """
        num_tokens = length - self._prompts.overhead - ANSWER_ROOM
        ended: set[str] = set()

        def make(work: _Work) -> Prompt | UsageError | None:
            if work.task.name in ended:
                return None
            try:
                return self._prompts.make(work.task.sample(work.number, num_tokens, seed))
            except UsageError as error:
                ended.add(work.task.name)
                return error

        with ThreadPoolExecutor(1, thread_name_prefix="prompts") as pool:
            following = pool.submit(make, works[0])
            for number, work in enumerate(works, 1):
                made = following.result()
                if number < len(works):
                    following = pool.submit(make, works[number])
                if isinstance(made, UsageError):
                    name = work.task.name
                    self._notice(Notice(f"{name} at {length:,}, sample {work.number}: {made}"))
                yield work, made if isinstance(made, Prompt) else None

    def _cell(self, task: Task, length: int, variant: Variant, seed: int) -> Cell:
        return self._folder.cell(self._key(task, length, variant, seed))

    def _key(self, task: Task, length: int, variant: Variant, seed: int) -> CellKey:
        config = self._decoder.config
        return CellKey(
            model=config.name,
            model_identity=config.identity,
            prompt_identity=self._chat.identity,
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            task=task.name,
            length=length,
            seed=seed,
            policy=variant.policy,
            variant=variant.label,
            fields=variant.fields,
            budget=variant.budget,
        )

    def _run_record(self, command: str) -> dict[str, str]:
        device = self._decoder.device
        on_gpu = device.type == "cuda"
        return {
            "command": command,
            "longread": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
        }


def _is_late(request: Request, started: float) -> bool:
    return request.limit_s is not None and time.perf_counter() - started > request.limit_s


def _result(sample: Sample, answers: Sequence[Said]) -> Result:
    pairs = list(zip(sample.questions, answers, strict=True))
    return Result(
        number=sample.number,
        scores=tuple(question.score(answer.text) for question, answer in pairs),
        kinds=tuple(question.kind for question, _ in pairs),
        answers=tuple(answer.text for answer in answers),
        rows_read=sum(answer.rows_read for answer in answers),
        rows_cached=sum(answer.rows_cached for answer in answers),
        measures=tuple(_measures(pairs).items()),
    )


def _measures(pairs: Sequence[tuple[Question, Said]]) -> dict[str, float]:
    """Further figures of the sample's answers, each the mean over the questions that have it."""
    found: dict[str, list[float]] = {}
    for question, answer in pairs:
        for name, value in (question.measure(answer.text) if question.measure else {}).items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
