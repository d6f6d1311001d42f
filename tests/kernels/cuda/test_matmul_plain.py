"""Dense weights and experts of F16 and BF16 in tiles: CUDA kernels on the CPU against float64."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from headroom.errors import KernelError
from headroom.formats.quants import BF16, F16
from headroom.kernels.cuda import matmul, pack
from headroom.kernels.cuda.experts import few_rows, refuses_sizes
from headroom.kernels.cuda.matmul import half_rows
from headroom.kernels.ops import ExpertTable
from headroom.kernels.weight import PLAIN_TYPES, Weight
from tests.gpu import check_experts, check_matmul
from tests.gpu.check_experts import to_tiles, wanted_sum
from tests.gpu.expert_cases import PLAIN, Case
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("gpu", "gpu_products"),
]


@pytest.fixture(autouse=True, params=[0, 1], ids=["before sm_80", "bf16 cores"])
def bf16_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the launchers run their kernels here, as both sorts of tensor cores would."""
    torch.manual_seed(0)

    def compile_for_cores(
        source: str, name: str, defines: Mapping[str, int] | None = None
    ) -> Callable[..., None]:
        if source not in ("experts.cu", "shared_picks.cu", "matmul.cu"):
            return compile_on_cpu(source, name, defines)
        kernel = compile_on_cpu(source, name, dict(defines or {}) | {"BF16_CORES": request.param})
        # The activation's blocks share its work among themselves, however many they are.
        return (
            (lambda grid, *rest: kernel((1,), *rest))
            if source == "many_experts.cu" and name == "activate"
            else kernel
        )

    use_kernels(monkeypatch, compile_for_cores)
    for check in (check_experts, check_matmul):
        monkeypatch.setattr(check, "DEVICE", "cpu")
    return bool(request.param)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_experts_agree_with_the_reference(case: Case, bf16_cores: bool) -> None:
    if not bf16_cores and case is not PLAIN[0]:
        pytest.skip("differs in bf16 alone")
    assert check_experts.check(*case, "own")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_rows_result_does_not_depend_on_other_rows(kind: str) -> None:
    assert check_experts.check_alone((kind, kind, kind), (3, 16, 264), 2)


def scaled_table(kind: str, by: float) -> ExpertTable:
    """Experts whose gates are small and whose ups and downs are `by` as large, or one over it."""

    def made(rows: int, columns: int, scale: float) -> tuple[Weight, ...]:
        values = (torch.randn(3, rows, columns) * scale).to(PLAIN_TYPES[kind])
        quant = check_experts.BY_NAME[kind]
        return tuple(Weight(one.view(torch.uint8), quant, rows, columns) for one in values)

    return ExpertTable(made(32, 64, 0.1), made(32, 64, by), made(64, 32, 1 / by))


@pytest.mark.parametrize(("kind", "by"), [("f16", 1000.0), ("bf16", 1e-12), ("bf16", 1e12)])
def test_weights_have_all_of_their_range(bf16_cores: bool, kind: str, by: float) -> None:
    if kind == "bf16" and not bf16_cores:
        pytest.skip("in f16, as dense weights are there")
    table = scaled_table(kind, by)
    ids, weights = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), torch.rand(2, 2)
    x = torch.randn(2, 64)
    found = few_rows(half_rows(x), ids, weights, to_tiles(table), "silu")
    wanted = wanted_sum((x, ids, weights), table, "silu")
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def test_sides_that_no_product_of_many_rows_takes_are_refused() -> None:
    assert refuses_sizes(32, 64) is None
    assert refuses_sizes(36, 64) == "matrices of 36 x 64 are not multiples of 8"
    assert refuses_sizes(32, 100) == "matrices of 32 x 100 are not multiples of 8"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(40, 328, 1), (33, 512, 19), (32, 264, 32)]
)
def test_few_rows_meet_the_numbers_of_dense_weights_as_they_are(
    kind: str, rows: int, columns: int, tokens: int
) -> None:
    assert check_matmul.check(kind, rows, columns, tokens)


@pytest.mark.parametrize(("kind", "by"), [("f16", 1000.0), ("bf16", 1e-12), ("bf16", 1e12)])
def test_dense_weights_have_all_of_their_range(bf16_cores: bool, kind: str, by: float) -> None:
    if kind == "bf16" and not bf16_cores:
        pytest.skip("in f16 there")
    values = (torch.randn(48, 256) * by).to(PLAIN_TYPES[kind])
    quant = check_experts.BY_NAME[kind]
    weight = check_matmul.to_tiles(Weight(values.view(torch.uint8), quant, 48, 256))
    x, found = torch.randn(9, 256), torch.empty(9, 48)
    matmul.matmul(x, weight, "bf16", found)
    assert check_matmul.distance(found, x.double() @ values.double().T) < 6e-4


@pytest.mark.parametrize("quant", [F16, BF16], ids=str)
def test_tiles_hold_exactly_the_numbers_of_the_file_and_prompts_read_them_back(quant: Any) -> None:
    values = (torch.randn(21, 260) * 100).to(PLAIN_TYPES[quant.name])
    tiles = torch.empty(matmul.tile_bytes(quant, 21, 260), dtype=torch.uint8)
    pack.pack(values.view(torch.uint8), quant, 21, 260, tiles)
    weight, out = Weight(tiles, quant, 21, 260, matmul.TILES), torch.empty_like(values)
    assert torch.equal(matmul.dequantise(weight, out), values)


def test_unpacked_weights_in_rows_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    values, x = torch.randn(5, 16).to(torch.bfloat16), torch.randn(3, 16)
    monkeypatch.setattr(torch, "mm", lambda x, m, out_dtype: torch.matmul(x.float(), m.float()))
    found = matmul.matmul(x, Weight(values, BF16, 5, 16), "bf16")
    assert check_matmul.distance(found, x.double() @ values.double().T) < 5e-3


def test_rows_that_are_not_read_four_numbers_at_a_time_are_refused() -> None:
    with pytest.raises(KernelError) as refused:
        pack.pack(torch.zeros(16, 180), F16, 16, 90, torch.zeros(8192, dtype=torch.uint8))
    assert str(refused.value) == (
        "Rows of 90 values in f16 cannot be packed on CUDA: no multiple of 4. "
        "Choose --weights unpacked."
    )
