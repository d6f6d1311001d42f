"""Products with 8-bit activations on every instruction set: AMX equals AVX-512 to the bit."""

import pytest
import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native.matmul import matmul_int8, prepare
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.weight import PLAIN_TYPES
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
                with_tiles, without = (on(isa, x, weight) for isa in ("amx", "avx512"))
                assert torch.equal(with_tiles, without), (rows, out, columns)


@pytest.mark.parametrize("quant", PACKED, ids=lambda quant: quant.name)
def test_a_row_is_the_same_alone_and_among_others(quant: QuantType) -> None:
    torch.manual_seed(0)
    columns = columns_of(quant)[-1]
    weight = prepare(random_weight(quant, 37, columns))
    x = torch.randn(47, columns)
    for isa in MODULE.isas():
        together = on(isa, x, weight)
        for row in (0, 15, 16, 31, 32, 40, 46):
            assert torch.equal(on(isa, x[row : row + 1], weight)[0], together[row]), (isa, row)


def test_the_best_instruction_set_is_taken_unless_another_is_named() -> None:
    POOL.set(1)
    assert POOL.ops.isa == MODULE.isas()[0]
    for isa in MODULE.isas():
        POOL.set(1, isa=isa)
        assert POOL.ops.isa == isa


def on(isa: str, x: torch.Tensor, weight: object) -> torch.Tensor:
    """The product with 8-bit activations on one instruction set, by two threads."""
    POOL.set(2, isa=isa)
    return matmul_int8(x, weight, "int8")
