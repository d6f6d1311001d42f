"""Products with rounded activations on every instruction set: which of them give equal bits."""

import pytest
import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native.matmul import matmul_int8, matmul_int24, prepare
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES, Weight
from tests.kernels.cases import WEIGHT_TYPES, random_weight

pytestmark = [
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
    pytest.mark.usefixtures("pool"),
]
PACKED = [quant for quant in WEIGHT_TYPES if quant.name not in PLAIN_TYPES]
HAS_TILES = MODULE is not None and "amx" in MODULE.isas()


def columns_of(quant: QuantType) -> tuple[int, ...]:
    """Return widths of full records and, for blocks of 32, of one and three cells more."""
    return (256, 768) if quant.block == 256 else (32, 256, 352)


@pytest.mark.skipif(not HAS_TILES, reason="this CPU or system has no 8-bit tiles")
@pytest.mark.parametrize("quant", PACKED, ids=lambda quant: quant.name)
def test_tiles_change_no_bit_of_a_product(quant: QuantType) -> None:
    torch.manual_seed(0)
    for columns in columns_of(quant):
        for out in (1, 16, 37):
            weight = prepare(random_weight(quant, out, columns))
            for rows in (1, 15, 16, 17, 31, 48, 300):  # 300: more than one batch of rows
                x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
                x[rows // 2] = 0
                with_tiles, without = (on(isa, x, weight, "int8") for isa in ("amx", "avx512"))
                assert torch.equal(with_tiles, without), (rows, out, columns)


@pytest.mark.parametrize("quant", PACKED, ids=lambda quant: quant.name)
def test_24_bit_products_have_the_same_bits_on_all_instruction_sets(quant: QuantType) -> None:
    torch.manual_seed(0)
    for columns in columns_of(quant):
        for out in (1, 16, 37):
            weight = prepare(random_weight(quant, out, columns))
            for rows in (1, 2, 3, 4, 7, 16, 21, 300):
                x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
                x[rows // 2] = 0
                wanted = on("portable", x, weight, "int24")
                for isa in MODULE.isas():
                    assert torch.equal(on(isa, x, weight, "int24"), wanted), (isa, rows, columns)


@pytest.mark.parametrize("quant", PACKED, ids=lambda quant: quant.name)
def test_24_bit_products_are_off_by_a_share_of_the_largest_of_32_values(quant: QuantType) -> None:
    """The bound is the rounding's: half a step for each value, times its weight."""
    torch.manual_seed(0)
    columns = columns_of(quant)[-1]
    packed = random_weight(quant, 37, columns)
    values = dequantise(packed.data, quant, columns).double()
    for rows in (1, 5, 40):
        x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
        half_steps = x.view(rows, -1, 32).abs().amax(-1, keepdim=True) / (127 << 17)
        bound = half_steps.expand(-1, -1, 32).reshape(rows, columns).double() @ values.abs().T
        sums = 1e-6 * (x.double().abs() @ values.abs().T)  # float32 sums of the blocks
        wanted = x.double() @ values.T
        for isa in MODULE.isas():
            error = (on(isa, x, prepare(packed), "int24").double() - wanted).abs()
            assert bool((error <= bound + sums).all()), (isa, rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["int8", "int24"])
def test_a_row_with_nan_or_infinity_spoils_its_own_result_only(bad: float, dtype: str) -> None:
    weight = prepare(random_weight(PACKED[0], 37, 256))
    x = torch.randn(3, 256)
    x[1, 7] = bad
    for isa in MODULE.isas():
        found = on(isa, x, weight, dtype)
        assert found[::2].isfinite().all(), isa
        assert found[1].isnan().all(), isa


@pytest.mark.parametrize("dtype", ["int8", "int24"])
@pytest.mark.parametrize("quant", PACKED, ids=lambda quant: quant.name)
def test_a_row_is_the_same_alone_and_among_others(quant: QuantType, dtype: str) -> None:
    torch.manual_seed(0)
    columns = columns_of(quant)[-1]
    weight = prepare(random_weight(quant, 37, columns))
    x = torch.randn(47, columns)
    for isa in MODULE.isas():
        together = on(isa, x, weight, dtype)
        for row in (0, 15, 16, 31, 32, 40, 46):
            assert torch.equal(on(isa, x[row : row + 1], weight, dtype)[0], together[row]), (
                isa,
                row,
            )


def test_the_best_instruction_set_is_taken_unless_another_is_named() -> None:
    POOL.set(1)
    assert POOL.ops.isa == MODULE.isas()[0]
    for isa in MODULE.isas():
        POOL.set(1, isa=isa)
        assert POOL.ops.isa == isa


def on(isa: str, x: torch.Tensor, weight: Weight, dtype: str) -> torch.Tensor:
    """The product with rounded activations on one instruction set, by two threads."""
    POOL.set(2, isa=isa)
    return (matmul_int8 if dtype == "int8" else matmul_int24)(x, weight, dtype)
