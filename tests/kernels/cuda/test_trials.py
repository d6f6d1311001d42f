"""The kernels that `headroom doctor` tries, run on the CPU as they are launched on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import matmul, probe, trials
from headroom.kernels.cuda.trials import TRIALS, run_trial
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

HOST = torch.device("cpu")


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, gpu_products: None
) -> list[tuple[str, str]]:
    """Run kernels on the CPU; return the sources and names of those that ran."""
    found: list[tuple[str, str]] = []

    def compiled(source: str, name: str, defines: dict[str, int] | None = None) -> object:
        found.append((source, name))
        if source == "sampler.cu":  # has what the stand-in of a GPU has not
            return lambda *call, **named: None
        return compile_on_cpu(source, name, defines)

    def batches(
        x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        assert out.dtype == out_dtype
        return out.copy_(torch.matmul(x.float(), y.float()))

    use_kernels(monkeypatch, compiled)
    monkeypatch.setattr(torch, "bmm", batches)
    return found


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("one", probe.PROBES, ids=lambda one: one.family)
def test_a_family_is_launched_with_its_own_kernel(
    one: probe.Probe, launched: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if one.family == "products of few rows":
        monkeypatch.setattr(trials, "TILED", {trials.Q4_K})  # a compiler starts for each type
    run_trial(one.family, HOST)
    assert (one.source, one.kernel) in launched


def test_products_are_tried_with_every_type_and_a_failure_names_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def weight(quant: trials.QuantType, device: torch.device) -> None:
        tried.append(str(quant))
        if quant.name == "q5_k":
            raise KernelError("matmul.cu does not compile")

    monkeypatch.setattr(trials, "_weight", weight)
    monkeypatch.setattr(matmul, "matmul", lambda x, weight, dtype: x)
    with pytest.raises(KernelError, match=r"q5_k: matmul\.cu does not compile"):
        run_trial("products of few rows", HOST)
    monkeypatch.setattr(trials, "_weight", lambda quant, device: tried.append(str(quant)))
    tried.clear()
    run_trial("products of few rows", HOST)
    assert len(tried) == len(set(tried)) == len(trials.TILED) == 12


def test_a_result_that_is_not_finite_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRIALS, "norms", lambda device: torch.tensor([1.0, torch.nan]))
    with pytest.raises(KernelError, match="kernels of norms return values that are not"):
        run_trial("norms", HOST)


def test_every_family_has_a_trial() -> None:
    assert set(TRIALS) == {one.family for one in probe.PROBES}
