"""The table of tasks, and names that stand for several of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from longread.errors import UsageError
from longread.evaluate import (
    books_qa,
    coreference,
    follow_ups,
    long_answers,
    long_qa,
    needles,
    ruler,
)
from longread.evaluate.book_text import NOVELS
from longread.evaluate.task import Materials, Task

TASKS: dict[str, Callable[[Materials], Task]] = {
    **ruler.TASKS,
    **needles.TASKS,
    **coreference.TASKS,
    **books_qa.TASKS,
    **follow_ups.TASKS,
    **long_answers.TASKS,
    **long_qa.TASKS,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(ruler.TASKS),
    **{
        family: tuple(name for name in long_qa.TASKS if name.startswith(f"{family}_"))
        for family in ("leval", "loogle", "longbench")
    },
}
IN_NOVELS = ("needles", "follow_ups", "coreference_far", "long_answers")  # they read when asked
COMPARED = tuple(long_answers.TASKS)  # answers that are set beside dense's token by token
ALL = "all"  # but LongBench's, whose files a user brings


def family_of(task: str) -> str:
    """The group that a task is one of, whose mean is a figure of its own; or the task itself."""
    return next((family for family, names in GROUPS.items() if task in names), task)


def task_names(names: Iterable[str]) -> list[str]:
    """The tasks that are named, by themselves or by their group, each once. Raises UsageError."""
    found: dict[str, None] = {}
    for name in names:
        if name == ALL:
            found |= dict.fromkeys(task for task in TASKS if task not in GROUPS["longbench"])
            continue
        if name not in TASKS and name not in GROUPS:
            known = [ALL, *GROUPS, *TASKS]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no task {name!r}; {hint}")
        found |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(found)


def make_tasks(names: Iterable[str], materials: Materials) -> list[Task]:
    """The tasks that `task_names` finds. Raises UsageError, also for data that is missing."""
    chosen = task_names(names)
    if any(name in IN_NOVELS for name in chosen):
        for novel in NOVELS:
            materials.path(novel)
    return [TASKS[name](materials) for name in chosen]
