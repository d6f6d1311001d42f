"""Compares whole models on a GPU with the plain kernels of the CPU."""

import gc
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.split.pipeline import Pipeline
from tests.gpu.running import open_pipeline, sequence, synth

Settings = Mapping[str, object]
F16: Settings = {"dtype": "f16", "kv_type": "f16"}
LIMIT = 0.03
PIECES = {
    "prefill": [100],
    "chunks": [40, 3, 57],
    "decode": [60] + [1] * 40,
    "few": [20, 12, 30, 1, 7, 30],
}
MODELS = (
    ("llama", "llama", ["--quant", "Q8_0"]),
    ("qwen3", "qwen3", ["--quant", "Q4_K_M"]),
    ("qwen3moe", "qwen3moe", ["--quant", "Q4_K_M"]),
    ("laguna", "laguna", ["--quant", "Q8_0"]),
    ("27b-4", "qwen35", ["--size", "qwen3.5-27b", "--layers", "4", "--quant", "Q4_K_M"]),
    ("35b-4", "qwen35moe", ["--size", "qwen3.5-35b-a3b", "--layers", "4", "--quant", "Q4_K_M"]),
)


def all_logits(pipeline: Pipeline, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits of all rows of a prompt that is read in pieces."""
    running, found = sequence(tokens, range(8)), []
    with torch.inference_mode():
        for rows in pieces:
            hidden = pipeline.forward(make_batch([Turn(running, rows)], 64))
            for first in range(0, len(hidden), 4):
                found.append(pipeline.logits(hidden[first : first + 4]).clone())
            running.cached += rows
    return torch.cat(found)


def compare(name: str, path: Path, ways: Sequence[Settings]) -> None:
    """Prompts read whole, in chunks, token by token and in small pieces, in one type or several."""
    torch.manual_seed(1)
    settings = {"context": 512, "parallel": 4, "chunk": 256}
    cpu, _ = open_pipeline(path, device="cpu", dtype="f32", kv_type="f32", **settings)
    tokens = torch.randint(0, min(cpu.vocab, 1000), (100,)).tolist()
    wanted = all_logits(cpu, tokens, [100])
    cpu.close()
    for given in ways:
        gpu, _ = open_pipeline(path, device="cuda:0", **settings, **given)
        for label, pieces in PIECES.items():
            try:
                found = all_logits(gpu, tokens, pieces)
            except Exception:
                print(f"FAIL {name} {label} {given}")
                traceback.print_exc(limit=6)
                continue
            error = float((found - wanted).norm() / wanted.norm())
            same = float((found.argmax(1) == wanted.argmax(1)).float().mean())
            what = f"{name} {given.get('dtype', 'as planned')} {label}"
            verdict = "PASS" if error < LIMIT else "FAIL"
            print(f"{verdict} {what}: error {error:.1e}, same best {same:.2f}", flush=True)
        gpu.close()
        del gpu
        gc.collect()  # what cycles of objects hold
        torch.cuda.empty_cache()


def main(folder: Path, ways: Sequence[Settings]) -> None:
    """Every family that the fused parts cover, small or with four layers of true width."""
    for name, family, more in MODELS:
        try:
            compare(name, synth(family, folder / f"{name}.gguf", *more), ways)
        except Exception:
            print("FAIL", name)
            traceback.print_exc(limit=8)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made), [{}, F16])
