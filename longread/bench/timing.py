"""How long work on a GPU takes: medians by events, of a body or of replays of a captured one."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 2


def graph_ms(body: Callable[[], None], repeats: int) -> float:
    """Median of the replays of a captured body."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return median_ms(graph.replay, repeats)


def median_ms(body: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of a body that queues work, after `WARM_UPS` runs."""
    for _ in range(WARM_UPS):
        body()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)
