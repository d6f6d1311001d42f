"""Prompt and decode speed of models on the CPU, side by side with llama.cpp.

    python benchmarks/cpu.py MODEL.gguf ... --llama-bench PATH [--rounds 3] [--threads 2]

Rounds of both programs alternate, so that a busy minute hurts both; the best round counts. Products
may name their instruction set: `--products int24 int24:avx2` compares the best one with AVX2.
"""

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headroom.engine.request import SamplingParams
from headroom.families.files import open_checkpoint
from headroom.kernels.native.measure import read_bandwidth
from headroom.kernels.native.module import POOL
from headroom.llm import LLM

PROMPT, DECODE, DEEP_DECODE = 512, 128, 64
PRODUCTS = ("int24", "f32", "int8")


@dataclass
class Speeds:
    """Tokens per second; the best that was seen."""

    prompt: float = 0.0
    decode: float = 0.0
    deep: float = 0.0  # decode after `depth` tokens

    def keep(self, other: "Speeds") -> None:
        """Take over what is faster."""
        self.prompt = max(self.prompt, other.prompt)
        self.decode = max(self.decode, other.decode)
        self.deep = max(self.deep, other.deep)


def run_headroom(path: Path, threads: int, depth: int, products: str) -> Speeds:
    """Measure our engine once, with an f16 cache as llama.cpp has it."""
    speeds = Speeds()
    context = max(depth, PROMPT) + DECODE + 64
    settings = {
        "context": context, "parallel": 1, "kv_type": "f16", "threads": threads,
        "no_prefix_cache": True,  # every round repeats its prompt
    }  # fmt: skip
    dtype, _, isa = products.partition(":")
    with LLM(str(path), dtype=dtype, **settings) as llm:
        POOL.set(threads, isa=isa)
        for _ in range(2):  # the first round also warms up
            one = llm.generate([[5] * PROMPT], SamplingParams(temperature=0, max_tokens=1))[0]
            speeds.keep(Speeds(prompt=PROMPT / one.timings.prefill_s))
        speeds.keep(Speeds(decode=decode_speed(llm, 1, DECODE)))
        if depth:
            speeds.keep(Speeds(deep=decode_speed(llm, depth, DEEP_DECODE)))
    return speeds


def decode_speed(llm: LLM, prompt: int, count: int) -> float:
    """Return the tokens per second after a prompt of `prompt` tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    done = llm.generate([[5] * prompt], params)[0]
    return (count - 1) / done.timings.decode_s


def run_llama(program: str, path: Path, threads: int, depth: int) -> Speeds:
    """Measure llama.cpp once."""
    base = [program, "-m", str(path), "-t", str(threads), "-ngl", "0", "-r", "1", "-o", "json"]

    def speed(*arguments: str) -> float:
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)[0]["avg_ts"])

    speeds = Speeds(
        prompt=speed("-p", str(PROMPT), "-n", "0"), decode=speed("-p", "0", "-n", str(DECODE))
    )
    if depth:
        speeds.deep = speed("-p", "0", "-n", str(DEEP_DECODE), "-d", str(depth))
    return speeds


def token_bytes(path: Path) -> int:
    """Return the weight bytes that one token reads: all but an embedding that is not the head."""
    tensors = open_checkpoint(path).tensors
    skip = {"embed"} if "head" in tensors else set()
    return sum(info.nbytes for name, info in tensors.items() if name not in skip)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--llama-bench", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--products", nargs="+", default=PRODUCTS)
    given = parser.parse_args()
    POOL.set(given.threads)
    bandwidth = max(read_bandwidth() for _ in range(3))
    print(f"read bandwidth {bandwidth:.1f} GB/s, {given.threads} threads, {POOL.ops.isa}\n")
    print(f"| model | products | prompt {PROMPT} | decode | of limit | decode at {given.depth} |")
    print("|---|---|---|---|---|---|")
    for path in given.models:
        ours, theirs = {products: Speeds() for products in given.products}, Speeds()
        for _ in range(given.rounds):
            for products in given.products:
                ours[products].keep(run_headroom(path, given.threads, given.depth, products))
            if given.llama_bench:
                theirs.keep(run_llama(given.llama_bench, path, given.threads, given.depth))
        for products, speeds in ours.items():
            share = speeds.decode * token_bytes(path) / (bandwidth * 1e9)
            prompt, decode, deep = (
                with_ratio(getattr(speeds, name), getattr(theirs, name))
                for name in ("prompt", "decode", "deep")
            )
            cells = (path.stem, products, prompt, decode, f"{100 * share:.0f} %", deep)
            print(f"| {' | '.join(cells)} |", flush=True)


def with_ratio(ours: float, theirs: float) -> str:
    """Return our speed, with llama.cpp's in brackets and the ratio where it was measured."""
    return f"{ours:.0f} [{theirs:.0f}] {ours / theirs:.2f}x" if theirs else f"{ours:.0f}"


if __name__ == "__main__":
    main()
