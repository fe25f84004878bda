"""What `--policies`, `--budgets` and `--reading` name: policies and ways to read by selection.

`tokenselect:vote=none:window_size=0` is the policy with two fields set; the fields of a policy's
dataclass can be set, all but the budget. What is not set is as in the settings. A reading has its
fields alone: `budget=4096:vote=group`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longread import values
from longread.config import INDEX_NAMES, VOTE_NAMES, Settings, parse_budget
from longread.errors import UsageError
from longread.past_window import VOTES, Reading
from longread.policies import POLICIES, Policy
from longread.policies.snapkv import POOLINGS

Parser = Callable[[object], object]


def _odd(low: int, high: int) -> Parser:
    whole = values.integer(low, high)

    def parse(value: object) -> int:
        number = whole(value)
        if number % 2 == 0:
            raise ValueError(f"it must be an odd number from {low} to {high}")
        return number

    return parse


# What a field of this name may be; other numbers are whole ones from 1.
_PARSERS: dict[str, Parser] = {
    "index": values.choice(INDEX_NAMES),
    "vote": values.choice(VOTE_NAMES),
    "pooling": values.choice(POOLINGS),
    "butler": str,
    **dict.fromkeys(("index_dim", "sink_size", "window_size", "neighbours"), values.integer(0)),
    **dict.fromkeys(("echo_share", "induction_share"), values.real(0.0, 1.0)),
    "beta": values.real(1.0, 1e6),  # below 1 the last layer would have the most
    "value_ratio": values.real(0.0, 1e6, above_low=True),
    "kernel_size": _odd(1, 1023),  # so that a row is in the middle of its neighbours
    "block_len": values.integer(1, 4096),
    "period": values.integer(2),
    "repeats": values.integer(2, 64),
    "stand_in": values.switch,
}
_READING_PARSERS: dict[str, Parser] = {
    "vote": values.choice(VOTES),
    "outer_norm": values.switch,
    "passage_len": _odd(1, 1023),
}


@dataclass(frozen=True)
class Variant:
    """A policy as it is measured. fields: every hyper-parameter but the budget, in order.

    budget: `5%` or a number of rows; empty for a policy without one.
    """

    policy: str
    budget: str
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The policy with the fields that are not its default: `tokenselect:vote=none`."""
        defaults = {
            field.name: field.default for field in dataclasses.fields(POLICIES[self.policy])
        }
        changed = [
            f":{name}={str(value).lower() if value is True else value}"
            for name, value in self.fields
            if defaults[name] != value
        ]
        return "".join([self.policy, *changed])

    @property
    def name(self) -> str:
        """Label and budget."""
        return f"{self.label} {self.budget}".rstrip()

    def make(self, num_rows: int, most: int | None = None) -> Policy:
        """The policy; a budget that is a share counts from `num_rows`, and is `most` at most."""
        fields = dict(self.fields)
        if self.budget:
            fields["budget"] = parse_budget(self.budget).resolve(num_rows, most)
        return POLICIES[self.policy](**fields)


def parse_variants(policies: str, budgets: str, settings: Settings) -> list[Variant]:
    """Each policy of a comma-separated list at each budget of another. Raises UsageError."""
    shares = [_budget_name(text) for text in budgets.split(",") if text.strip()]
    found: dict[Variant, None] = {}
    for text in policies.split(","):
        if text.strip():
            policy, fields = _policy(text.strip(), settings)
            has_budget = "budget" in _hyper_parameters(policy)
            if has_budget and not shares:
                raise UsageError(f"{policy} needs a budget: give --budgets 5%,20%")
            for budget in shares if has_budget else [""]:
                found[Variant(policy, budget, fields)] = None
    if not found:
        raise UsageError(f"--policies names no policy; there are {', '.join(POLICIES)}")
    return list(found)


def _budget_name(text: str) -> str:
    """One spelling for each budget: 0.05 is 5%."""
    budget = parse_budget(text)
    if budget.fraction is None:
        return str(budget.tokens)
    return f"{100 * budget.fraction:.6g}%"


def _policy(text: str, settings: Settings) -> tuple[str, tuple[tuple[str, Any], ...]]:
    name, *assignments = text.split(":")
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r}; {_near(name, list(POLICIES))}")
    parameters = _hyper_parameters(name)
    if any(assignment.partition("=")[0].strip() == "budget" for assignment in assignments):
        raise UsageError(f"{text}: budgets are given with --budgets")
    parsers = {
        field: _parser(field, str(parameter.type))
        for field, parameter in parameters.items()
        if field != "budget"
    }
    given = _given(text, name, assignments, parsers)
    found = {
        field: given.get(field, getattr(settings, field, parameter.default))
        for field, parameter in parameters.items()
        if field != "budget"
    }
    if found.get("stand_in") and found["vote"] != "group":
        raise UsageError(f"{text}: stand_in needs vote=group, and the vote is {found['vote']!r}")
    # A switch that is off has no place: cells from before there was one stay what they are.
    return name, tuple((field, value) for field, value in found.items() if value is not False)


def parse_reading(text: str) -> Reading:
    """A reading with some fields set, as `budget=4096:vote=group`. Raises UsageError."""
    parsers = {
        field.name: _READING_PARSERS.get(field.name, values.integer(1))
        for field in dataclasses.fields(Reading)
    }
    return Reading(**_given(text, "--reading", text.split(":"), parsers))


def _given(
    text: str, name: str, assignments: Sequence[str], parsers: Mapping[str, Parser]
) -> dict[str, Any]:
    """The values of `field=value` texts."""
    given: dict[str, Any] = {}
    for assignment in assignments:
        field, mark, value = assignment.partition("=")
        field = field.strip().replace("-", "_")
        if field not in parsers:
            raise UsageError(
                f"{text}: {name} has no field {field!r}; {_near(field, list(parsers))}"
            )
        try:
            if not mark:
                raise ValueError("it needs a value")
            given[field] = parsers[field](value.strip())
        except ValueError as error:
            raise UsageError(f"{text}: {field} is {value!r}: {error}") from None
    return given


def _hyper_parameters(policy: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(POLICIES[policy]) if field.init}


def _parser(field: str, annotation: str) -> Parser:
    assert field in _PARSERS or annotation == "int", f"what may {field} be?"
    return _PARSERS.get(field, values.integer(1))


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
