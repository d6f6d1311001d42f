"""Measures how fast CPU threads answer a GPU from inside a captured step."""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import expert_cache, handover
from headroom.kernels.cuda.expert_cache import CpuRequest
from headroom.kernels.cuda.expert_rules import NO_POLICY
from headroom.kernels.cuda.handover import Mailbox
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.native.cold import ColdTable, ColdWorker
from headroom.kernels.ops import Picks

HIDDEN, WIDTH, USED, ROUNDS, TRIES = 256, 32, 8, 100, 5


def handover_seconds(device: str) -> float:
    """Return the seconds that a request with almost no work adds to a layer without a request."""
    kind = BY_NAME["q8_0"]
    size = tile_bytes(kind, WIDTH, HIDDEN)
    blob = torch.zeros(2 * size + tile_bytes(kind, HIDDEN, WIDTH), dtype=torch.uint8)
    where = blob.data_ptr() + size * torch.arange(3, dtype=torch.int64)
    table = ColdTable(where.repeat(USED, 1), (kind,) * 3, WIDTH, HIDDEN, USED, "silu")
    box = Mailbox.allocate(HIDDEN, 1, device)
    worker = ColdWorker(box.addresses, [table], handover.MOST_ROWS)
    try:
        asked, unasked = (_round_seconds(worker, box, hot, device) for hot in (0, 1))
        if box.failed or worker.failure:
            raise KernelError(f"The CPU did not answer a GPU: {worker.failure or 'in time'}.")
    finally:
        worker.close()
    return max(asked - unasked, 1e-7)


def _round_seconds(worker: ColdWorker, box: Mailbox, hot: int, device: str) -> float:
    """Return the median time of one hand-over in a captured run of many."""
    x, out = (torch.ones(1, HIDDEN, device=device) for _ in range(2))
    weights = torch.ones(1, USED, device=device)
    is_hot = torch.full((USED,), hot, dtype=torch.int32, device=device)
    is_hot[1:] = 1  # at most expert 0 is cold
    nothing = torch.zeros(USED + 1, dtype=torch.int32, device=device)
    table = expert_cache.static_table(is_hot, nothing)
    picks = [torch.arange(USED, dtype=torch.int32, device=device)[None] for _ in range(ROUNDS)]

    def work() -> None:
        for turn, ids in enumerate(picks):
            ids[:, :1].zero_()  # zero_(): assigning a number would copy it from the host
            expert_cache.resolve(Picks(ids, weights), table, NO_POLICY, CpuRequest(x, box, 0))
            handover.collect(out, box, 0, last=turn == ROUNDS - 1)

    worker.begin_step()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(TRIES):
        start, end = _event(), _event()
        worker.begin_step()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / ROUNDS)
    return sorted(times)[TRIES // 2]


def _event() -> "torch.cuda.Event":
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
