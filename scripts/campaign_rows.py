"""KV rows for store campaigns and tests: each a function of all tokens up to it, as real ones are.

So a row that was taken from another document, from another position or from a damaged file differs
from the row that belongs there. Not a model: nothing here is computed by attention.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROW_DIMS = {"k": 2, "v": 2, "q_moment": None}
_NUM_LAYERS, _NUM_HEADS, _HEAD_DIM = 2, 2, 8


def rows(token_ids: np.ndarray, start: int, end: int) -> dict[str, Tensor]:
    """The block of rows [start, end): k, v [L, H_kv, n, D] bf16 and their q_moment [L, H_kv, D, D].

    q_moment is the number of rows, so that a share of a block's rows has that share of it.
    """
    seen = np.cumsum(token_ids.astype(np.int64) * (2 * np.arange(len(token_ids)) + 1))[start:end]
    parts = np.stack([(seen >> shift) % 251 for shift in range(_HEAD_DIM)], axis=-1)
    k = torch.from_numpy(parts).to(torch.bfloat16).expand(_NUM_LAYERS, _NUM_HEADS, -1, -1)
    moment = torch.full((_NUM_LAYERS, _NUM_HEADS, _HEAD_DIM, _HEAD_DIM), float(end - start))
    return {"k": k, "v": -k, "q_moment": moment}


def is_right(token_ids: np.ndarray, start: int, end: int, tensors: dict[str, Tensor]) -> bool:
    """Whether `tensors` are exactly the rows that belong to these tokens."""
    expected = rows(token_ids, start, end)
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], tensor) for name, tensor in expected.items()
    )
