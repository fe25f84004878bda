"""The options that commands share: names, help, nothing of what they do.

Each is None unless given, so that only what the user typed overrides a setting; values are checked
in `config`, which knows where each came from.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from longread.config import POLICY_NAMES


def _be_verbose(value: bool) -> bool:
    if value:
        logger = logging.getLogger("longread")
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
    return value


Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Catalogue name, GGUF file, folder or hub id."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="auto, bfloat16 or float32.")
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FORM", help="Of answers: auto, bf16, int8 or int4."),
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", metavar="DTYPE", help="Of the cache: bf16, or int8 at half of it."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help=f"What each answer token reads: {', '.join(POLICY_NAMES)}.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="N", help="Rows per KV head: tokens (512), fraction (0.2) or 20%."
    ),
]
Vote = Annotated[
    str | None,
    typer.Option(
        "--vote", metavar="NAME", help="How heads vote: group, group-max, all, threshold or none."
    ),
]
MinVotes = Annotated[
    str | None,
    typer.Option("--min-votes", metavar="N", help="With --vote threshold: votes a row needs."),
]
Index = Annotated[
    str | None,
    typer.Option("--index", metavar="NAME", help="Keys to score with: int8, fp8 or exact."),
]
IndexDim = Annotated[
    str | None,
    typer.Option("--index-dim", metavar="N", help="Width; 0: a quarter of a head, 32 at least."),
]
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="MODE", help="How to read: auto, dense, select or yarn."),
]
SinkSize = Annotated[
    str | None, typer.Option("--sink-size", metavar="N", help="First rows that are always read.")
]
WindowSize = Annotated[
    str | None, typer.Option("--window-size", metavar="N", help="Last rows that are always read.")
]
Reselect = Annotated[
    str | None,
    typer.Option("--reselect", metavar="N", help="Choose rows anew every N answer tokens."),
]
Butler = Annotated[
    str | None,
    typer.Option("--butler", metavar="FILE", help="With --policy butler: its trained predictor."),
]
Neighbours = Annotated[
    str | None,
    typer.Option(
        "--neighbours", metavar="N", help="With --policy butler: rows read around each chosen one."
    ),
]
MaxTokens = Annotated[
    str | None, typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens.")
]
Temperature = Annotated[
    str | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.")
]
TopP = Annotated[
    str | None,
    typer.Option("--top-p", metavar="P", help="Sample among tokens of this much probability."),
]
Seed = Annotated[str | None, typer.Option("--seed", metavar="N", help="Seed of the sampling.")]
NoWait = Annotated[
    bool | None,
    typer.Option("--no-wait", help="Fail at once where another process holds the cache entry."),
]
NoCache = Annotated[
    bool | None, typer.Option("--no-cache", help="Neither read nor write the cache on disk.")
]
Truncate = Annotated[
    bool | None,
    typer.Option("--truncate", help="Cut documents that are over the model's window."),
]
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", metavar="DIR", help="Where the cache lies.")
]

SessionName = Annotated[
    str | None,
    typer.Option("--session", metavar="NAME", help="Save the turns under a name, or go on there."),
]
Pages = Annotated[
    str | None, typer.Option("--pages", metavar="RANGES", help="Read only these: 3,10-40.")
]
Password = Annotated[
    str | None,
    typer.Option("--password", metavar="TEXT", help="Of the document; or set LONGREAD_PASSWORD."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, notes or sources; warnings stay.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=_be_verbose, help="Show timings, and tracebacks of faults."
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write what was looked at: FILE.html, or FILE.pdf, a copy with highlights.",
    ),
]
ShowSelected = Annotated[
    bool,
    typer.Option(
        "--show-selected",
        help="Show the passages that were selected, and a map; with -v, layers and KV heads.",
    ),
]
