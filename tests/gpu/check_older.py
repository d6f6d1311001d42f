"""Runs what GPUs older than the one at hand would: `--sm 75` (as said nothing) or `--sm 86`.

Kernels are compiled for the older GPU, which takes ways of its own, and blocks have no more shared
memory than there. With `--models` whole models run so, too.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from headroom.formats.quants import BY_NAME
from tests.gpu import (
    check_attention,
    check_delta_net,
    check_experts,
    check_grouped,
    check_matmul,
    check_models,
    check_norms,
    check_route,
    check_sampler,
    expert_cases,
)
from tests.gpu.attention_cases import Heads
from tests.gpu.kept import keep_code
from tests.gpu.older import as_older

Check = tuple[str, Callable[[], object]]
MIXED = ("q4_k", "q4_k", "q6_k")
LONG = [(5136, 512, 24), (96, 5120, 32), (50, 1024, 3)]  # of products, also with long records


def checks(sm: int) -> Iterator[Check]:
    """A case of every kernel, and of every type of weights and caches."""
    dtype = "f16" if sm < 80 else "bf16"

    def named(run: Callable[..., object], *args: object, **more: object) -> Check:
        return f"{run.__module__}.{run.__name__} {args} {more}", partial(run, *args, **more)

    for kind in check_matmul.KINDS:
        yield named(check_matmul.check, kind, 128, 2048, 16)
        yield named(check_matmul.check, kind, 33, 768, 40, dtype)
    for kind, size in ((kind, size) for kind in ("q4_k", "q8_0") for size in LONG):
        if size[1] % BY_NAME[kind].block == 0:
            yield named(check_matmul.check, kind, *size)
    yield named(check_matmul.check_outputs, "q5_k")
    yield named(check_matmul.check_alone, "q8_0", 144, 2048)
    yield named(check_matmul.check_rows, 9, 2048)
    few = [(0, 1), (5, 3), (127, 1), (128, 2), (200, 1)]
    for kind in check_attention.ALL_TYPES:
        yield named(check_attention.check_decode, Heads(8, 2, 64, kind, kind), few)
    for kind in ("f16", "bf16"):
        heads = Heads(24, 4, 256, kind, kind)
        yield named(check_attention.check_decode, heads, [(900, 16), (129, 3)], True)
        yield named(check_attention.check_decode, Heads(8, 4, 512, kind, kind), [(500, 5), (3, 1)])
    for heads in (Heads(8, 2, 64), Heads(8, 2, 256, "q8_0", "q4_0"), Heads(4, 2, 512, "bf16")):
        yield named(check_attention.check_prefill, heads, [(0, 130), (77, 65)], 0, dtype)
    yield named(check_attention.check_prefill, Heads(4, 2, 128), [(600, 700)], 256, dtype)
    yield named(check_attention.check_rope, "bf16", Heads(6, 2, 64), 16, True)
    yield named(check_experts.check, MIXED, (6, 256, 512), 5, 3, "silu")
    yield named(check_experts.check, ("mxfp4", "q8_0", "q4_0"), (4, 160, 288), 2, 4, "gelu")
    yield named(check_experts.check, ("bf16", "bf16", "f16"), (4, 264, 520), 5, 2, "silu")
    yield named(check_experts.check, MIXED, (4, 256, 512), 70, 2, "silu", "sorted")
    yield named(check_experts.check, ("bf16", "f16", "q8_0"), (4, 96, 520), 40, 2, "silu", "sorted")
    for case in expert_cases.GROUPED[2:]:
        yield named(check_grouped.check, *case, dtype)
    for case in check_delta_net.cases()[:13]:
        yield named(check_delta_net.check, *case)
    yield named(check_route.check_scores, 257, 2048)
    yield named(check_route.check_scored_rows, 257, 2048)
    yield named(check_experts.check_shared, *expert_cases.SHARED[1])
    yield named(check_norms.check_norm, 3, 2048)
    for size in check_sampler.SIZES[:2]:
        yield named(check_sampler.check, *size)


def main(sm: int, models: bool) -> None:
    """Run every case."""
    keep_code()
    torch.manual_seed(0)
    with as_older(sm):
        for name, run in checks(sm):
            try:
                run()
                torch.cuda.synchronize()
            except Exception:
                print("FAIL", name)
                traceback.print_exc(limit=4)
        if models:
            with tempfile.TemporaryDirectory() as made:
                check_models.main(Path(made), [check_models.F16 if sm < 80 else {}])


if __name__ == "__main__":
    asked = int(sys.argv[sys.argv.index("--sm") + 1]) if "--sm" in sys.argv else 75
    main(asked, "--models" in sys.argv)
