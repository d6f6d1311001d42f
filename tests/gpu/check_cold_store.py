"""Checks a store of hot and cold experts on a GPU: its bytes, its kernels, its exchanges.

With --bench it times loading and exchanges of experts as large as those of Qwen3.5-35B-A3B.
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from headroom.experts.cold import stored_tiles
from headroom.experts.cuda_ffn import upload_experts
from headroom.experts.exchange import Exchange, ExchangeRound, StoreExchanges
from headroom.experts.layer_store import LayerStore
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.experts.store import ExpertStore, StoreRequest, blob_layout, fill_tiles, open_store
from headroom.families.config import ExpertsConfig
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import experts_prefill
from headroom.kernels.cuda.experts import ExpertTiles, few_rows
from headroom.kernels.cuda.matmul import half_rows
from headroom.layers.upload import Upload
from headroom.plan.cost_model import ColdSpeeds
from headroom.units import MIB
from tests.experts.stores import exchange
from tests.gpu.check_experts import forced
from tests.gpu.kept import keep_code
from tests.gpu.torch_tiles import pack_tiles
from tests.gpu.weight_file import WeightFile

DEVICE = "cuda"
ROWS = (1, 5, 70)  # of steps
STEPS_PER_LOOK = 3  # steps that are launched between two looks at an exchange
Kinds = tuple[str, str, str]
CASES: list[tuple[Kinds, int, int, int]] = [
    (("q4_k", "q4_k", "q6_k"), 16, 512, 2048),
    (("q8_0", "q8_0", "q8_0"), 8, 64, 256),
    (("mxfp4", "mxfp4", "q5_0"), 9, 96, 288),
]


class Layer:
    """A layer's experts in a file, and the store that was filled from it."""

    def __init__(self, folder: Path, kinds: Kinds, sizes: tuple[int, int, int]) -> None:
        self.experts, self.width, self.hidden = sizes
        self.kinds = kinds
        self.file = WeightFile(folder / "weights")
        shapes = ((self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width))
        self.parts = [
            self.file.add(f"ffn.experts.{name}", kind, self.experts, *shape)
            for name, kind, shape in zip(("gate", "up", "down"), kinds, shapes, strict=True)
        ]

    def open(self, hot: tuple[int, ...], pin: bool) -> tuple[ExpertStore, LayerStore]:
        """Load it with some experts hot."""
        request = StoreRequest(
            placement=ExpertPlacement((hot,), "drawn"),
            cold="gpu" if pin else "cpu",
            speeds=ColdSpeeds(1e12, 1e10, 1e10, 1e-5),
            pin=pin,
            keep_copy=False,
            staging_bytes=66 * MIB,
        )
        with Upload(DEVICE) as way:
            get = self.file.source(way)
            config = ExpertsConfig(experts=self.experts, used=2, width=self.width)
            layout = blob_layout(config, get, tiles=True)
            store = open_store([layout], request, DEVICE, lambda line, size: None)
            layer = store.layers[0]
            assert layer is not None
            fill_tiles(layer, get, store.staging)
        return store, layer

    def tiles(self) -> ExpertTiles:
        """Return the layer's experts, all in GPU memory."""
        with Upload(DEVICE) as way:
            return upload_experts(self.file.source(way), self.experts)

    def blob(self, expert: int) -> torch.Tensor:
        """The bytes that an expert must have."""
        columns = (self.hidden, self.hidden, self.width)
        parts = zip(self.parts, self.kinds, columns, strict=True)
        return torch.cat([pack_tiles(x[expert], BY_NAME[kind], n) for x, kind, n in parts])


def wrong_experts(layer: Layer, stored: LayerStore) -> list[int]:
    """The experts that a store does not hold as it should."""
    wrong = []
    for expert in range(layer.experts):
        blob = stored.slot_of(expert)
        blob = stored.cold_of(expert) if blob is None else blob
        if blob is None or not torch.equal(blob.cpu(), layer.blob(expert)):
            wrong.append(expert)
    return wrong


def make_step(layer: Layer, rows: int) -> Callable[[ExpertTiles], torch.Tensor]:
    """A step of drawn rows, on experts wherever they are."""
    used = 2
    x = torch.randn(rows, layer.hidden, device=DEVICE)
    ids = torch.stack([torch.randperm(layer.experts)[:used] for _ in range(rows)]).int().to(DEVICE)
    weights = torch.rand(rows, used, device=DEVICE)
    if rows <= 32:
        return lambda table: few_rows(half_rows(x), ids, weights, table, "silu")

    def many(table: ExpertTiles) -> torch.Tensor:
        with forced(""):  # hot experts unpacked as cold ones are
            return experts_prefill.many_rows(x, ids, weights, table, "silu")

    return many


def same_answers(layer: Layer, stored: LayerStore, rows: int) -> bool:
    """Whether kernels give the same bits for cold experts as for hot ones."""
    step = make_step(layer, rows)
    return torch.equal(step(layer.tiles()), step(stored_tiles(stored)))


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a step as a CUDA graph and return what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def run() -> torch.Tensor:
        graph.replay()
        return out.clone()

    return run


def overlapped(layer: Layer, opened: tuple[ExpertStore, LayerStore], rows: int) -> bool:
    """Return whether steps launched during exchanges give the bits of all-hot ones."""
    store, stored = opened
    step = make_step(layer, rows)
    wanted, tiles = step(layer.tiles()), stored_tiles(stored)
    run = captured(lambda: step(tiles)) if rows <= 32 else lambda: step(tiles)
    cold = [expert for expert in range(layer.experts) if expert not in stored.hot]
    pairs = list(zip(cold, stored.hot, strict=False))
    planned = [Exchange(0, *pair, 1.0, 2 * stored.expert_bytes) for pair in pairs]
    exchanges = ExchangeRound(
        StoreExchanges(store, [LayerExperts(layer.experts, 1)], same_bits=True), planned
    )
    outs, overlapping = [], 0
    while not exchanges.over:
        outs += [run() for _ in range(STEPS_PER_LOOK)]
        if not exchanges.ready():
            overlapping += STEPS_PER_LOOK
        elif exchanges.turned:
            exchanges.end()
        else:
            torch.cuda.synchronize()
            exchanges.turn()
        if len(outs) >= 300:
            torch.cuda.synchronize()
            outs = [out for out in outs if not torch.equal(out, wanted)]
    torch.cuda.synchronize()
    good = all(torch.equal(out, wanted) for out in outs)
    done = len(exchanges.done)
    print(f"  {rows} rows: {done} exchanges, copies under way after {overlapping} steps")
    return good and exchanges.error is None and exchanges.done == planned


def check(kinds: Kinds, sizes: tuple[int, int, int], pin: bool) -> bool:
    """Load with every second expert hot, compute, exchange, compute again and meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        layer = Layer(Path(folder), kinds, sizes)
        opened = layer.open(tuple(range(0, sizes[0], 2)), pin)
        stored = opened[1]
        good = not wrong_experts(layer, stored)
        rows = ROWS if pin else ()
        good &= all(same_answers(layer, stored, count) for count in rows)
        for promoted, demoted in ((1, 0), (3, 4), (0, 1), (5, 2)):
            exchange(stored, promoted, demoted)
        good &= not wrong_experts(layer, stored)
        good &= all(same_answers(layer, stored, count) for count in rows)
        good &= all(overlapped(layer, opened, count) for count in rows)
        return good and not wrong_experts(layer, stored)


def bench() -> None:
    """Time loading and exchanges at the size of a real layer."""
    with tempfile.TemporaryDirectory() as folder:
        layer = Layer(Path(folder), ("q4_k", "q4_k", "q6_k"), (256, 512, 2048))
        for share in (0.0, 0.6, 1 - 1 / 256):
            hot = tuple(range(int(256 * share)))
            started = time.perf_counter()
            _, stored = layer.open(hot, pin=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            size = layer.experts * stored.expert_bytes
            print(f"load {len(hot)} of 256 hot: {seconds:.3f} s, {size / seconds / 1e9:.1f} GB/s")
        times = []
        for number in range(20):
            started = time.perf_counter()
            exchange(stored, 255 if number % 2 == 0 else 0, 0 if number % 2 == 0 else 255)
            times.append(time.perf_counter() - started)
        print(f"exchange: {sorted(times)[10] * 1e6:.0f} us, {stored.expert_bytes} bytes each way")


def main() -> int:
    """Run all checks; return the number of failures."""
    keep_code()
    torch.manual_seed(0)
    failures = 0
    for kinds, *sizes in CASES:
        for pin in (True, False):
            try:
                good = check(kinds, (sizes[0], sizes[1], sizes[2]), pin)
            except Exception:
                traceback.print_exc()
                good = False
            failures += not good
            print(f"{'PASS' if good else 'FAIL'} {'/'.join(kinds)} {sizes} pinned {pin}")
    if "--bench" in sys.argv:
        bench()
    return failures


if __name__ == "__main__":
    sys.exit(main())
