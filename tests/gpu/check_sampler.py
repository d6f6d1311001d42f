"""Compares tokens drawn on a GPU with the engine's sampler, and times both ways with --bench."""

import sys
import traceback
from dataclasses import replace

import numpy as np
import torch

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import sample as sample_on_cpu
from headroom.kernels.cuda import sampler
from headroom.kernels.cuda.sampler import SamplerScratch, Tables
from headroom.kernels.cuda.sampler_tables import build_tables
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us
from tests.sampler_cases import CASES, HISTORY, masks_of, tables_of

SEEDS = 6  # of each setting
# Vocabulary, spread of logits, whether they tie.
SIZES = ((300, 3.0, False), (300, 3.0, True), (32000, 2.0, False), (50257, 4.0, True))
# Vocabulary, spread of logits, tokens that each mask allows.
MASKED = ((300, 3.0, 1), (300, 3.0, 40), (32000, 2.0, 3), (50257, 4.0, 20000), (50257, 4.0, 700))


def on_gpu(cases: list[SamplingParams]) -> Tables:
    """The settings of some requests, on the device."""
    tables = tables_of(cases)
    return build_tables(lambda name: getattr(tables, name).cuda())


def check(vocabulary: int, spread: float, ties: bool) -> None:
    """Each setting with several seeds, all rows in one call."""
    cases = [replace(c, seed=9 * s - 30, draw=s % 2) for c in CASES.values() for s in range(SEEDS)]
    logits = torch.randn(len(cases), vocabulary) * spread
    if ties:
        logits = logits.round()
    expected = [sample_on_cpu(r.numpy(), HISTORY, c) for r, c in zip(logits, cases, strict=True)]
    tables, device = on_gpu(cases), logits.cuda()
    scratch = SamplerScratch.allocate(len(cases), vocabulary, "cuda")
    out = torch.full((len(cases),), -1, device="cuda")
    for turn in range(2):  # the second call reads what the first has left in scratch
        found = {
            "cuda": sampler.sample_fast(device, tables, scratch, out.fill_(-1)).tolist(),
            "torch": sampler.sample(device, tables).tolist(),
        }
        for name, tokens in found.items():
            wrong = [i for i, token in enumerate(tokens) if token != expected[i]]
            verdict = "FAIL" if wrong else "PASS"
            print(f"{verdict} {name} {vocabulary} spread {spread} ties {ties} turn {turn}", end="")
            print(
                f": {len(wrong)} of {len(cases)} other",
                sorted({list(CASES)[i // SEEDS] for i in wrong}),
            )
            for i in wrong[:4]:
                print("   ", cases[i], "drew", tokens[i], "not", expected[i])


def check_masked(vocabulary: int, spread: float, many: int) -> None:
    """Rows that are limited by masks, drawn after the others of the same step."""
    cases = [replace(c, seed=9 * s - 30, draw=s % 2) for c in CASES.values() for s in range(SEEDS)]
    logits, masks = (
        torch.randn(len(cases), vocabulary) * spread,
        masks_of(len(cases), vocabulary, many),
    )
    given = zip(logits, cases, masks, strict=True)
    expected = [
        sample_on_cpu(r.numpy(), HISTORY, c, mask if row % 2 else None)
        for row, (r, c, mask) in enumerate(given)
    ]
    tables, device = on_gpu(cases), logits.cuda()
    tables.limited[1::2] = 1
    words = torch.from_numpy(masks.view(np.int32)).cuda()
    scratch = SamplerScratch.allocate(len(cases), vocabulary, "cuda")
    out = torch.full((len(cases),), -1, device="cuda")
    for name in ("cuda", "torch"):
        out.fill_(-1)
        for given_masks in (None, words):
            if name == "cuda":
                sampler.sample_fast(device, tables, scratch, out, given_masks)
            else:
                sampler.sample_into(device, tables, out, given_masks)
        wrong = [i for i, token in enumerate(out.tolist()) if token != expected[i]]
        verdict = "FAIL" if wrong else "PASS"
        print(f"{verdict} {name} {vocabulary} masked, {many} allowed: {len(wrong)} other")
        for i in wrong[:4]:
            print("   ", cases[i], "drew", int(out[i]), "not", expected[i])


def bench(rows: int, params: SamplingParams, name: str) -> None:
    """Median time of both ways on a vocabulary of 248320."""
    count = max(2, 80 // rows)
    logits = [torch.randn(rows, 248320, device="cuda") * 3 for _ in range(count)]
    tables = on_gpu([replace(params, seed=row) for row in range(rows)])
    scratch = SamplerScratch.allocate(rows, 248320, "cuda")
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    fast = time_us([lambda x=x: sampler.sample_fast(x, tables, scratch, out) for x in logits])
    plain = time_us([lambda x=x: sampler.sample(x, tables) for x in logits[:3]])
    masks = torch.from_numpy(masks_of(rows, 248320, 5000).view(np.int32)).cuda()
    tables.limited.fill_(1)
    late = time_us(
        [lambda x=x: sampler.sample_fast(x, tables, scratch, out, masks) for x in logits]
    )
    left = time_us([lambda x=x: sampler.sample_fast(x, tables, scratch, out) for x in logits])
    print(
        f"BENCH sampler {name} x{rows}: cuda {fast:.0f} us, torch {plain:.0f} us; limited rows: "
        f"{left:.0f} us where they wait, {late:.0f} us when drawn"
    )


def main() -> None:
    keep_code()
    torch.manual_seed(0)
    for case in SIZES:
        try:
            check(*case)
        except Exception:
            print("FAIL", case)
            traceback.print_exc(limit=4)
    for vocabulary, spread, many in MASKED:
        try:
            check_masked(vocabulary, spread, many)
        except Exception:
            print("FAIL masked", vocabulary, many)
            traceback.print_exc(limit=4)
    if "--bench" not in sys.argv:
        return
    for rows in (1, 16):
        for name in ("greedy", "plain", "all filters", "top-p"):
            bench(rows, CASES[name], name)


if __name__ == "__main__":
    main()
