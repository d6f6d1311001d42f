"""Measures the C++ kernels: gigabytes of weights per second, against the read bandwidth."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.native import experts, matmul
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.weight import Weight

MEASURED_TYPES = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "f16",
)  # fmt: skip
SIZE = 4096  # rows and columns of a product
TOUCHED_BYTES = 512 << 20  # read in one round: more than any cache holds
EXPERTS, EXPERTS_USED, HIDDEN, WIDTH = 256, 8, 2048, 512  # a layer of Qwen3.5-35B-A3B
PROMPT_ROWS = 64  # rows of a prompt; with as many experts each expert has eight picks
TIMED_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """The speed of one kernel."""

    name: str
    gb_per_s: float  # weights read
    share: float  # share of the read bandwidth that was measured in the same run


def measure_kernels() -> Iterator[Measured]:
    """Yield the read bandwidth, one-row products of each type, and one token's experts."""
    bandwidth = read_bandwidth()
    yield Measured("read", bandwidth, 1.0)
    for name in MEASURED_TYPES:
        for products in _RUN if BY_NAME[name].block > 1 else ("f32",):
            speed = product_speed(BY_NAME[name], products)
            yield Measured(f"{name} x {products}, one row", speed, speed / bandwidth)
    for products in ("int8", "int24"):
        speed = expert_speed(products)
        yield Measured(f"experts q4_k/q6_k x {products}, one token", speed, speed / bandwidth)


def read_bandwidth() -> float:
    """Return the read bandwidth of memory with all threads, in GB/s."""
    data = torch.ones(TOUCHED_BYTES, dtype=torch.uint8)
    return best_speed(lambda: POOL.ops.read_bytes(data.data_ptr(), len(data)), len(data))


_RUN = {"int8": matmul.matmul_int8, "int24": matmul.matmul_int24, "f32": matmul.matmul_f32}


def product_speed(quant: QuantType, products: str) -> float:
    """Return the speed of one-row products, in GB/s of weights."""
    size = MODULE.panel_bytes(quant.ggml_id, SIZE, SIZE)
    count = TOUCHED_BYTES // size
    data = random_panels(quant, SIZE * count, SIZE)
    weights = [
        Weight(data[first : first + size], quant, SIZE, SIZE, matmul.PANELS)
        for first in range(0, count * size, size)
    ]
    x = torch.randn(1, SIZE)
    run = _RUN[products]

    def multiply() -> None:
        for weight in weights:
            run(x, weight, "")

    return best_speed(multiply, count * size)


_SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


def _kinds() -> tuple[QuantType, ...]:
    return BY_NAME["q4_k"], BY_NAME["q4_k"], BY_NAME["q6_k"]


def expert_bytes() -> int:
    """Return the bytes of the layer that `expert_speed` makes."""
    sizes = (
        MODULE.panel_bytes(kind.ggml_id, EXPERTS * rows, columns)
        for kind, (rows, columns) in zip(_kinds(), _SHAPES, strict=True)
    )
    return sum(sizes)


def expert_speed(products: str, *, tiles: bool = False) -> float:
    """Return the speed of one token's experts in one layer, in GB/s of weights.

    `tiles`: the weights are in the GPU's tiles, which take as many bytes as panels at these sizes.
    """
    layer = replace(_layer(EXPERTS), tiles=tiles)
    one = layer.blobs.shape[1]
    rounds = max(1, TOUCHED_BYTES // (EXPERTS_USED * one))
    x, weights = torch.randn(1, HIDDEN), torch.rand(1, EXPERTS_USED)
    picks = [torch.randperm(EXPERTS)[:EXPERTS_USED][None].int() for _ in range(rounds)]

    def answer() -> None:
        for ids in picks:
            experts.experts(x, ids, weights, layer, "silu", products)

    return best_speed(answer, rounds * EXPERTS_USED * one)


def expert_flops() -> float:
    """Return the floating-point operations per second of experts in tiles with eight rows each.

    This is how the CPU computes its share of a prompt: with activations of 24 bits, or of 16 with
    AVX-512.
    """
    layer = replace(_layer(PROMPT_ROWS), tiles=True)
    x, weights = torch.randn(PROMPT_ROWS, HIDDEN), torch.rand(PROMPT_ROWS, EXPERTS_USED)
    row, pick = torch.arange(PROMPT_ROWS)[:, None], torch.arange(EXPERTS_USED)
    ids = ((row + pick * EXPERTS_USED) % PROMPT_ROWS).int()  # every expert is picked equally often
    work = 6 * WIDTH * HIDDEN * ids.numel()  # three products, a multiplication and an addition each
    return 1e9 * best_speed(lambda: experts.experts(x, ids, weights, layer, "silu", "int24"), work)


def _layer(count: int) -> experts.PanelTable:
    """Return a table of `count` experts with random weights."""
    kinds = _kinds()
    parts = [
        random_panels(kind, count * rows, columns).view(count, -1)
        for kind, (rows, columns) in zip(kinds, _SHAPES, strict=True)
    ]
    return experts.PanelTable.of_blobs(torch.cat(parts, dim=1), kinds, _SHAPES)


def random_panels(quant: QuantType, rows: int, columns: int) -> torch.Tensor:
    """Return panels of random bits with every scale a small number."""
    size = MODULE.panel_bytes(quant.ggml_id, rows, columns)
    some = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    some &= 0x3B  # f16 scales below one, so that no sum overflows
    return some.repeat(-(-size // len(some)))[:size]


def best_speed(run: Callable[[], object], size_bytes: int) -> float:
    """Return gigabytes per second in the best of a few rounds."""
    times = []
    for _ in range(TIMED_ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return size_bytes / min(times) / 1e9
