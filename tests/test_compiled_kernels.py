"""Kernels are compiled for a GPU that need not be there: the interpreter takes more than that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_case import ON_GPU

PAST = (
    *("attend_listed_kernel", "merge_kernel", "turn_rows_kernel", "attend_listed_kernel"),
    *("rope_kernel", "mean_queries_kernel", "norms_kernel", "votes_kernel"),
    *("count_votes_kernel", "list_rows_kernel"),
)
STEP = (
    *("matvec_kernel", "append_token_kernel", "choose_rows_kernel", "attend_kernel"),
    *("merge_kernel", "add_mass_kernel", "swiglu_kernel"),
)


@pytest.mark.skipif(ON_GPU, reason="the other tests compile the kernels")
@pytest.mark.parametrize(("what", "kernels"), (("past", PAST), ("step", STEP)))
def test_the_kernels_compile(what: str, kernels: tuple[str, ...], tmp_path: Path) -> None:
    script = Path(__file__).parent / "compile_kernels.py"
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), what], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == set(kernels)
