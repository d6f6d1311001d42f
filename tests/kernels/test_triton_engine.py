"""A whole model in Triton's kernels, from request to tokens, on a GPU that is not there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom import llm
from headroom.engine.engine import Engine
from headroom.engine.request import SamplingParams
from headroom.kernels.triton import attention, experts, launch, matmul, rows
from headroom.layers import draws
from headroom.machine.devices import detect_cpu
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.split import launch as launching
from tests.kernels.test_triton import interpreted, use_large_tiles
from tests.pretend_cuda import OnCuda, Pretence, PretendedError, plain, pretend_cuda
from tests.pretend_stage import GPU

PROMPTS = [[72, 101, 108, 108, 111], [7] * 40]  # the second is longer than what goes as few rows
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=3, ignore_eos=True)
# What a layer of a Llama is made of, in Triton.
WANTED = {"embed", "rms_norm", "product", "rope", "write", "attend", "gated"}
SETTINGS = {"context": 64, "parallel": 2, "dtype": "f32", "kv_type": "f32"}


class _Interpreted:
    """A kernel of Triton that takes tensors of the pretended GPU, and no others."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **named: Any) -> None:
            for value in (*args, *named.values()):
                if isinstance(value, torch.Tensor) and not isinstance(value, OnCuda):
                    raise PretendedError("Triton is given a tensor of the host")
            with torch._C.DisableTorchFunction():
                self._kernel[grid](
                    *map(plain, args), **{name: plain(value) for name, value in named.items()}
                )

        return launched


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of Triton's kernels that ran, while this machine has a GPU."""
    found: set[str] = set()
    use_large_tiles(monkeypatch)

    def find_kernel(module: str, name: str) -> _Interpreted:
        found.add(name)
        return _Interpreted(launch.find_kernel(module, name))

    for module in (attention, experts, matmul, rows):
        monkeypatch.setattr(module, "find_kernel", find_kernel)
    # Tokens are drawn by a kernel of CUDA, whose plain twin stands in for it here.
    monkeypatch.setattr(
        draws, "sample_fast", lambda x, tables, scratch, out: out.copy_(draws.sample(x, tables))
    )
    # Only a driver knows what memory it has.
    monkeypatch.setattr(launching, "open_device_memory", lambda device: None)
    monkeypatch.setattr(launching, "check_memory", lambda *given: None)
    for name, value in (("memory_reserved", 0), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    monkeypatch.setattr(llm, "make_run_plan", _plan_there)
    run = Engine._run

    def run_there(engine: Engine) -> None:
        with Pretence():  # of this thread, too
            run(engine)

    monkeypatch.setattr(Engine, "_run", run_there)
    with pretend_cuda(monkeypatch):
        yield found


def _plan_there(shape: ModelShape, options: Options) -> Plan:
    host = replace(detect_cpu(), name="host", runs_layers=False)
    return make_plan([shape], [GPU, host], options)


def answers(path: Path, **settings: object) -> list[tuple[int, ...]]:
    with llm.LLM(str(path), **SETTINGS, **settings) as model:
        done = model.generate(PROMPTS, GREEDY) + model.generate(PROMPTS[:1], DRAWN)
    return [answer.token_ids for answer in done]


@pytest.fixture
def wanted(tiny_path: Path) -> list[tuple[int, ...]]:
    """What the CPU says with plain kernels."""
    return answers(tiny_path, device="cpu", kernels="reference", threads=1)


@interpreted
def test_a_model_in_triton_says_what_the_cpu_says(
    wanted: list[tuple[int, ...]], tiny_path: Path, launches: set[str]
) -> None:
    assert answers(tiny_path, device="cuda:0", kernels="triton") == wanted
    assert launches >= WANTED
