"""The table of weight types agrees with the gguf package's."""

import gguf
import pytest

from headroom.errors import FormatError
from headroom.formats.quants import BY_GGML_ID, BY_NAME, Q2_0, Q4_K, QUANTS, QuantType, quant_of


@pytest.mark.parametrize("quant", [x for x in QUANTS if x is not Q2_0], ids=str)
def test_a_type_has_the_blocks_of_the_gguf_package(quant: QuantType) -> None:
    kind = gguf.GGMLQuantizationType[quant.name.upper()]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert quant.ggml_id == kind.value
    assert quant.block == block
    assert quant.block_bytes == block_bytes
    assert BY_GGML_ID[kind.value] is BY_NAME[quant.name] is quant


def test_the_blocks_of_the_type_that_the_package_lacks_are_those_of_ggml() -> None:
    # 64 values of two bits after a float16 scale, number 42 in ggml.h
    assert (Q2_0.ggml_id, Q2_0.block, Q2_0.block_bytes) == (42, 64, 2 + 64 // 4)


def test_every_type_that_the_package_knows_is_read_or_refused_by_name() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.value in BY_GGML_ID:
            assert quant_of(kind.value, "t").name == kind.name.lower()
        else:
            with pytest.raises(FormatError, match=rf"'t' has type {kind.name} \(number"):
                quant_of(kind.value, "t")


def test_bytes_are_those_of_whole_blocks() -> None:
    assert Q4_K.bytes_for(512) == 288
    with pytest.raises(FormatError, match="500 values are not whole q4_k blocks of 256"):
        Q4_K.bytes_for(500)
