"""The reference dequantiser gives the gguf package's bits for every block type."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.quants import I32, Q1_0, Q2_0, Q4_K, Q8_0, Q8_K, QUANTS, QuantType
from headroom.kernels.reference.dequant import dequantise

WEIGHT_TYPES = [quant for quant in QUANTS if quant.runs]
# Byte offsets of a block's float16 or float32 scales, where tests put extreme values.
SCALE_OFFSETS = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "q8_k": (2,), "iq4_nl": (0,), "f16": (0,), "bf16": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "tq1_0": (52,), "tq2_0": (64,), "iq4_xs": (0,),
    "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,),
    "q1_0": (0,), "q2_0": (0,),
}  # fmt: skip
EXTREME_HALVES = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01,
)  # fmt: skip


def oracle(data: npt.NDArray[np.uint8], quant: QuantType) -> npt.NDArray[np.float32]:
    if quant is Q2_0:  # the package does not know it: two bits, 0 to 3, stand for -1 to 2
        scale = data[:, :2].copy().view(np.float16).astype(np.float32)
        bits = np.unpackbits(data[:, 2:], axis=1, bitorder="little").reshape(len(data), 64, 2)
        return (bits[..., 0] + 2.0 * bits[..., 1] - 1).astype(np.float32) * scale
    if quant is Q1_0:  # nor does it decode this one: a bit stands for the sign of the scale
        scale = data[:, :2].copy().view(np.float16).astype(np.float32)
        bits = np.unpackbits(data[:, 2:], axis=1, bitorder="little")
        return np.where(bits == 1, scale, -scale)
    if quant is Q8_K:  # the package cannot read it; it is a float scale and signed bytes
        scale = data[:, :4].copy().view(np.float32)
        return scale * data[:, 4:260].view(np.int8).astype(np.float32)
    kind = gguf.GGMLQuantizationType(quant.ggml_id)
    return np.asarray(gguf.quants.dequantize(data, kind), dtype=np.float32)


def assert_same_bits(ours: torch.Tensor, theirs: npt.NDArray[np.float32]) -> None:
    found = ours.numpy()
    assert found.shape == theirs.shape
    number = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(found), ~number)
    assert np.array_equal(found.view(np.uint32)[number], theirs.view(np.uint32)[number])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=str)
def test_random_blocks_give_the_bits_of_the_gguf_package(quant: QuantType) -> None:
    rng = np.random.default_rng(quant.ggml_id)
    data = rng.integers(0, 256, (4096, quant.block_bytes), dtype=np.uint8)
    assert_same_bits(dequantise(torch.from_numpy(data), quant, quant.block), oracle(data, quant))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("quant", [q for q in WEIGHT_TYPES if q.name in SCALE_OFFSETS], ids=str)
def test_extreme_scales_give_the_bits_of_the_gguf_package(quant: QuantType) -> None:
    rng = np.random.default_rng(quant.ggml_id)
    data = rng.integers(0, 256, (2048, quant.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[quant.name]:
        scales = rng.choice(np.array(EXTREME_HALVES, dtype="<u2"), len(data))
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    assert_same_bits(dequantise(torch.from_numpy(data), quant, quant.block), oracle(data, quant))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_mxfp4_exponent_gives_the_bits_of_the_gguf_package() -> None:
    quant = next(q for q in QUANTS if q.name == "mxfp4")
    data = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, quant.block_bytes))
    data[:, 1:] = np.arange(16, dtype=np.uint8) * 17  # every value, in both nibbles
    assert_same_bits(dequantise(torch.from_numpy(data), quant, quant.block), oracle(data, quant))


@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=str)
def test_any_leading_shape_and_any_alignment_give_the_same_values(quant: QuantType) -> None:
    rng = np.random.default_rng(1)
    values, nbytes = quant.block * 3, quant.block_bytes * 3
    data = torch.from_numpy(rng.integers(0, 128, (2, 5, nbytes), dtype=np.uint8))
    whole = dequantise(data, quant, values)
    assert whole.shape == (2, 5, values)
    assert whole.dtype == torch.float32
    shifted = torch.zeros(data.numel() + 1, dtype=torch.uint8)
    shifted[1:] = data.flatten()
    again = dequantise(shifted[1:].view(2, 5, nbytes), quant, values)
    torch.testing.assert_close(again, whole, rtol=0, atol=0, equal_nan=True)
    one = dequantise(data[1, 3, : quant.block_bytes], quant, quant.block)
    torch.testing.assert_close(one, whole[1, 3, : quant.block], rtol=0, atol=0, equal_nan=True)


def test_no_values_give_an_empty_tensor() -> None:
    assert dequantise(torch.zeros((3, 0), dtype=torch.uint8), Q4_K, 0).shape == (3, 0)


def test_rows_of_every_tensor_of_the_default_model_equal_the_gguf_package(
    smollm2_path: Path,
) -> None:
    tensors = open_checkpoint(smollm2_path).tensors
    assert len(tensors) == 272
    for info in tensors.values():
        rows = info.data().reshape(-1, info.quant.bytes_for(info.shape[-1]))
        some = rows[:: max(1, len(rows) // 64)].copy()
        ours = dequantise(torch.from_numpy(some), info.quant, info.shape[-1])
        assert_same_bits(ours, oracle(some, info.quant))


def test_bytes_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(FormatError, match="32 values of type q8_0 take 34 bytes, not 33"):
        dequantise(torch.zeros(33, dtype=torch.uint8), Q8_0, 32)
    with pytest.raises(FormatError, match="33 values are not whole q8_0 blocks of 32"):
        dequantise(torch.zeros(34, dtype=torch.uint8), Q8_0, 33)


def test_types_that_are_not_weights_are_refused() -> None:
    with pytest.raises(FormatError, match="Values of type i32 are not weights"):
        dequantise(torch.zeros(4, dtype=torch.uint8), I32, 1)
