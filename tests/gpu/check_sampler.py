"""Compares tokens drawn on a GPU with the engine's sampler, and times both ways with --bench."""

import sys
import traceback
from dataclasses import fields, replace

import torch

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import sample as sample_on_cpu
from headroom.kernels.cuda import sampler
from headroom.kernels.cuda.sampler import SamplerScratch, SamplerTables
from tests.gpu.timing import time_us

HISTORY = [3, 3, 5, 7, 11, 3, 96, 96, 2] * 40
CASES = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.7, frequency_penalty=0.3),
    SamplingParams(),
    SamplingParams(temperature=3.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(top_k=1),
    SamplingParams(top_k=1000, min_p=0.001),
    SamplingParams(top_k=3000, temperature=2.0, top_p=0.9),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.99, temperature=20.0),
    SamplingParams(top_p=0.0),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=0.00001, temperature=5.0),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05, presence_penalty=0.5),
    SamplingParams(penalty_window=0, repetition_penalty=1.3, frequency_penalty=0.1, top_p=0.9),
    SamplingParams(logit_bias={4: 9.5, 17: -100.0, 2: 3.25}, top_p=0.95),
)


def tables_of(cases: list[SamplingParams], history: list[int]) -> SamplerTables:
    """The settings of some requests, on the device."""
    tables = SamplerTables.allocate(len(cases), 512, 4, "cpu")
    for row, params in enumerate(cases):
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "draw"):
            getattr(tables, name)[row] = getattr(params, name)
        tables.repetition[row] = params.repetition_penalty
        tables.frequency[row] = params.frequency_penalty
        tables.presence[row] = params.presence_penalty
        tables.position[row] = len(history)
        recent = history[-params.penalty_window :] if params.penalty_window else history
        tables.recent[row, : len(recent)] = torch.tensor(recent)
        for place, (token, bias) in enumerate(params.logit_bias.items()):
            tables.bias_ids[row, place] = token
            tables.bias[row, place] = bias
    return SamplerTables(**{f.name: getattr(tables, f.name).cuda() for f in fields(tables)})


def check(vocabulary: int, spread: float, ties: bool) -> None:
    """Each setting with several seeds, all rows in one call."""
    cases = [replace(c, seed=9 * s - 30, draw=s % 2) for c in CASES for s in range(6)]
    logits = torch.randn(len(cases), vocabulary) * spread
    if ties:
        logits = logits.round()
    expected = [sample_on_cpu(r.numpy(), HISTORY, c) for r, c in zip(logits, cases, strict=True)]
    tables, device = tables_of(cases, HISTORY), logits.cuda()
    scratch = SamplerScratch.allocate(len(cases), vocabulary, "cuda")
    out = torch.full((len(cases),), -1, device="cuda")
    for turn in range(2):  # the second call meets what the first has left in scratch
        found = {
            "cuda": sampler.sample_fast(device, tables, scratch, out.fill_(-1)).tolist(),
            "torch": sampler.sample(device, tables).tolist(),
        }
        for name, tokens in found.items():
            wrong = [i for i, token in enumerate(tokens) if token != expected[i]]
            verdict = "FAIL" if wrong else "PASS"
            print(f"{verdict} {name} {vocabulary} spread {spread} ties {ties} turn {turn}", end="")
            print(f": {len(wrong)} of {len(cases)} other", sorted({str(i // 6) for i in wrong}))
            for i in wrong[:4]:
                print("   ", cases[i], "drew", tokens[i], "not", expected[i])


def bench(rows: int, params: SamplingParams, name: str) -> None:
    """Median time of both ways on a vocabulary of 248320."""
    count = max(2, 80 // rows)
    logits = [torch.randn(rows, 248320, device="cuda") * 3 for _ in range(count)]
    tables = tables_of([replace(params, seed=row) for row in range(rows)], HISTORY)
    scratch = SamplerScratch.allocate(rows, 248320, "cuda")
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    fast = time_us([lambda x=x: sampler.sample_fast(x, tables, scratch, out) for x in logits])
    plain = time_us([lambda x=x: sampler.sample(x, tables) for x in logits[:3]])
    print(f"BENCH sampler {name} x{rows}: cuda {fast:.0f} us, torch {plain:.0f} us")


def main() -> None:
    torch.manual_seed(0)
    for case in ((300, 3.0, False), (300, 3.0, True), (32000, 2.0, False), (50257, 4.0, True)):
        try:
            check(*case)
        except Exception:
            print("FAIL", case)
            traceback.print_exc(limit=4)
    if "--bench" not in sys.argv:
        return
    for rows in (1, 16):
        bench(rows, CASES[0], "greedy")
        bench(rows, CASES[2], "plain")
        bench(rows, CASES[4], "top-k 20 top-p 0.8")
        bench(rows, CASES[8], "top-p 0.95")


if __name__ == "__main__":
    main()
