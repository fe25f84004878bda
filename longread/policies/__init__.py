"""The table of policies: which cached rows a decode step reads."""

from __future__ import annotations

import dataclasses

from longread.config import Settings, parse_budget
from longread.policies.base import KernelPlan, Policy, Rereader, StandIn, Turn
from longread.policies.butler import Butler
from longread.policies.dense import Dense
from longread.policies.h2o import H2O
from longread.policies.pyramidkv import PyramidKV
from longread.policies.quest import Quest
from longread.policies.razor import Razor
from longread.policies.snapkv import SnapKV
from longread.policies.streaming import Streaming
from longread.policies.tokenselect import TokenSelect
from longread.policies.xkv import XKV

POLICIES: dict[str, type[Policy]] = {
    "dense": Dense,
    "tokenselect": TokenSelect,
    "streaming": Streaming,
    "butler": Butler,
    "quest": Quest,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": H2O,
    "razor": Razor,
    "xkv": XKV,
}

__all__ = [
    "POLICIES",
    "Butler",
    "Dense",
    "H2O",
    "KernelPlan",
    "Policy",
    "PyramidKV",
    "Quest",
    "Razor",
    "Rereader",
    "SnapKV",
    "StandIn",
    "Streaming",
    "TokenSelect",
    "Turn",
    "XKV",
    "make_policy",
]


def make_policy(settings: Settings, num_rows: int, most: int | None = None) -> Policy:
    """The policy of `settings`: a field takes the setting of its name, others what the paper has.

    num_rows: rows of the documents, of which a budget given as a fraction is one, of `most` rows.
    """
    policy_type = POLICIES[settings.policy]
    names = {field.name for field in dataclasses.fields(policy_type) if field.init}
    values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    if "budget" in values:
        values["budget"] = parse_budget(settings.budget).resolve(num_rows, most)
    return policy_type(**values)
