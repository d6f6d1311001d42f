"""Times what a prompt does about cold experts on a GPU, part by part; run as a module."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from headroom.experts import prefill
from headroom.experts.copies import CudaCopies
from headroom.experts.prefill import ColdStream, PrefillCpu, StreamedLayer
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.native.cold import worker_threads
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Picks
from headroom.plan import cost_model
from headroom.plan.cost_model import ColdSpeeds
from headroom.units import GIB, MIB
from tests.experts.cold_layers import PrefillStore
from tests.gpu.check_cold_stream import DEVICE, LINK, open_layers, real_layer, seconds
from tests.gpu.kept import keep_code

# An H200 with 16 CPU cores.
RATES = ColdSpeeds(gpu=4e12, link=48e9, cpu=80e9, handover_s=1e-5, copy=55e9, cpu_flops=750e9)
ROWS = (32, 128, 256, 512)
# Cold experts, and the picks of a row that are hot: by chance, or by statistics.
CASES = ((1.0, 0.0), (0.4, 0.6), (0.4, 0.894))
LAYERS = 4  # of a round
# How experts are shared if nothing is known of copies that slow the CPU down.
HOPEFUL = {
    "CPU_READ_SHARE": 1.0,
    "CPU_FLOPS_SHARE": 1.0,
}


@dataclass
class Watch:
    """What was seen of counted layers: host times by part, and the last of what was asked."""

    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    layers: int = 0
    loads: list[Any] = field(default_factory=list)
    asked: tuple[Any, ...] | None = None
    _at: float = 0.0

    def lap(self, part: str) -> None:
        """What went on since the last lap was this."""
        now = time.perf_counter()
        self.times[part] += now - self._at
        self._at = now

    def told(self) -> str:
        parts = (f"{part} {1e6 * took / self.layers:.0f}" for part, took in self.times.items())
        return ", ".join(parts)


class Awaited:
    """The CPU's answers, and how long the host waits for them."""

    def __init__(self, watch: Watch, future: Any) -> None:
        self._watch, self._future = watch, future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)  # `concurrent.futures.wait` looks inside a future

    def result(self) -> Any:
        found = self._future.result()
        self._watch.lap("wait for the CPU")
        return found


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Record where the time of counted layers goes."""
    read, begin = prefill.read_back, ColdStream.begin
    counted, streamed, ask = StreamedLayer._counted, StreamedLayer._streamed, PrefillCpu.ask

    def see_counted(self: StreamedLayer, *what: Any) -> torch.Tensor:
        watch._at = time.perf_counter()
        watch.layers += 1
        found = counted(self, *what)
        watch.lap("add")
        return found

    def see_read(*what: Any) -> list[torch.Tensor]:
        watch.lap("count")
        found = read(*what)
        watch.lap("read back (and the GPU before)")
        return found

    def see_ask(self: PrefillCpu, *what: Any) -> Any:
        watch.lap("share")
        watch.asked = what
        return Awaited(watch, ask(self, *what))

    def see_streamed(self: StreamedLayer, *what: Any) -> torch.Tensor:
        watch.lap("prepare")
        found = streamed(self, *what)
        watch.lap("launch the rest")
        return found

    def see_begin(self: ColdStream, loads: Any, ahead: Any) -> None:
        watch.loads = list(loads)
        begin(self, loads, ahead)
        watch.lap("first copies")

    with (
        patch.object(prefill, "read_back", see_read),
        patch.multiple(StreamedLayer, _counted=see_counted, _streamed=see_streamed),
        patch.object(PrefillCpu, "ask", see_ask),
        patch.object(ColdStream, "begin", see_begin),
    ):
        yield


def choose(layer: PrefillStore, rows: int, hits: float) -> torch.Tensor:
    """Picks of which so many are hot."""
    hot = layer.host_addresses[:, 0] == 0
    chances = torch.where(hot, hits / hot.sum().clamp(min=1), (1 - hits) / (~hot).sum())
    return torch.multinomial(chances.expand(rows, -1), 8).int().to(DEVICE)


def time_way(
    layers: list[PrefillStore], rows: int, hits: float, speeds: ColdSpeeds | None
) -> Watch:
    """Time layers one after another; no speeds: all cold experts are copied."""
    watch = Watch()
    prefill.most_counted_rows = lambda *facts: rows * (speeds is not None)  # type: ignore[assignment]
    stream = open_layers(layers, 64 * MIB // layers[0].expert_bytes, True, speeds or LINK)
    hidden = layers[0].tiles.hidden
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    weights, out = torch.rand(rows, 8, device=DEVICE), torch.zeros(rows, hidden, device=DEVICE)
    ids = [choose(layer, rows, hits) for layer in layers]

    def step() -> None:
        for layer, picked in zip(stream.layers, ids, strict=True):
            layer.many_rows(x, Picks(picked, weights), Addends(residual=out), out)

    step()
    torch.cuda.synchronize()
    assert stream.waits is not None
    before, waited = stream.counts.cpu_s, stream.waits.seconds()
    bytes_before = stream.counts.streamed_bytes, stream.counts.cpu_bytes
    repeats = 5
    with watched(watch):
        took = seconds(step, repeats) / len(layers)
    runs = (repeats + 1) * len(layers)
    size = layers[0].expert_bytes * runs
    moved = (stream.counts.streamed_bytes - bytes_before[0]) / size
    left = (stream.counts.cpu_bytes - bytes_before[1]) / size
    print(
        f"  {took * 1e6:6.0f} us a layer; {moved:.0f} experts copied, {left:.0f} left to the CPU; "
        f"the GPU waits for copies {1e6 * (stream.waits.seconds() - waited) / runs:.0f}, the CPU "
        f"computes {1e6 * (stream.counts.cpu_s - before) / runs:.0f}",
        flush=True,
    )
    if watch.layers:
        print(f"         host, us: {watch.told()}", flush=True)
    return watch


def spent(work: Callable[[], object], repeats: int = 7) -> str:
    """The median time of the host alone."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    return f"{sorted(times)[repeats // 2] * 1e6:.0f}"


def time_alone(watch: Watch) -> None:
    """The last layer's copies and its CPU's part, each alone and both at once."""
    queue, side = CudaCopies(DEVICE), PrefillCpu()
    room = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    some = torch.randn(512, 2048)

    def copy() -> None:
        for load in watch.loads:
            queue.wait(queue.copy(room, load.sources, queue.mark()))

    def compute() -> None:
        assert watch.asked is not None
        side._compute(*watch.asked)

    def after_torch() -> None:
        some.bfloat16()  # on torch's threads, which spin after that
        compute()

    def both() -> None:
        copy()
        compute()

    runs = sum(len(load.sources) for load in watch.loads)
    print(
        f"         alone, us: {runs} copies {seconds(copy) * 1e6:.0f} (host {spent(copy)})", end=""
    )
    if watch.asked is not None:
        compute()
        print(
            f", CPU {spent(compute)}, CPU after an operation of torch {spent(after_torch)}, CPU "
            f"while copies run {spent(both)}, until both are done {seconds(both) * 1e6:.0f}",
            end="",
        )
    print(flush=True)


def time_case(share: float, hits: float) -> None:
    """All ways of one placement."""
    two = [real_layer(share) for _ in range(2)]
    layers = [two[number % 2] for number in range(LAYERS)]
    for rows in ROWS:
        print(f"{share:.0%} cold, {hits:.0%} of picks hot, {rows} rows", flush=True)
        print(" all copied", flush=True)
        time_way(layers, rows, hits, None)
        print(" counted, no CPU", flush=True)
        time_way(layers, rows, hits, LINK)
        if MODULE is None:
            continue
        print(" counted, with the CPU as the rule says", flush=True)
        time_way(layers, rows, hits, RATES)
        print(" counted, with the CPU as if copies cost it nothing", flush=True)
        with patch.multiple(cost_model, **HOPEFUL):
            time_alone(time_way(layers, rows, hits, RATES))


def main() -> None:
    """Time every placement."""
    keep_code()
    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    POOL.set(worker_threads(cores))
    print(f"{cores} cores, torch's threads {torch.get_num_threads()}", flush=True)
    arena = scratch.Arena(torch.empty(GIB + GIB // 2, dtype=torch.uint8, device=DEVICE), GIB)
    with scratch.opened(arena):
        for share, hits in CASES:
            time_case(share, hits)


if __name__ == "__main__":
    main()
