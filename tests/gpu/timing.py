"""Times work on a GPU as one captured graph, so that launches from Python do not count."""

from collections.abc import Callable, Sequence

import torch


def time_us(turns: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Return the median time of one turn in microseconds; give turns that share no data."""
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in turns:
            turn()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(turns))
    return sorted(times)[len(times) // 2]
