"""Quantised safetensors: each format's parts become one tensor with exactly their values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headroom.errors import FormatError
from headroom.formats.quantised import join_quantised
from headroom.formats.quants import F32, MXFP4
from headroom.formats.safetensors import read_safetensors
from headroom.formats.tensor import ComposedTensor, TensorInfo
from headroom.kernels.reference.dequant import dequantise
from tests.formats.quantised_weights import (
    METHODS,
    Quantised,
    compressed,
    fp8,
    gptq,
    gptq_settings,
    mxfp4_codes,
    packed,
)
from tests.optional import optional

library = optional("compressed_tensors")
NAME = "model.layers.0.mlp.up_proj"


def random_weight(rows: int = 64, columns: int = 128) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(rows, columns) * 0.05


def save(parts: dict[str, torch.Tensor], path: Path) -> list[TensorInfo]:
    save_file({NAME + end: part for end, part in parts.items()}, path)
    return list(read_safetensors(path).tensors.values())


def join(parts: dict[str, torch.Tensor], settings: Any, folder: Path) -> TensorInfo:
    """The one tensor that parts are joined to."""
    infos = save(parts, folder / "model.safetensors")
    (found,) = join_quantised(infos, settings, folder / "config.json")
    return found


def values(info: TensorInfo) -> torch.Tensor:
    data = torch.from_numpy(info.data().copy())
    return dequantise(data, info.quant, data.numel() * info.quant.block // info.quant.block_bytes)


@pytest.mark.parametrize("name", METHODS)
def test_the_joined_tensor_has_the_values_of_its_parts(name: str, tmp_path: Path) -> None:
    method, weight = METHODS[name], random_weight()
    quantised = method.quantise(weight)
    found = join(quantised.parts, method.settings, tmp_path)
    assert (found.name, found.shape, found.quant) == (NAME + ".weight", (64, 128), method.held)
    assert torch.equal(values(found).view(64, 128), quantised.values)
    error = (quantised.values - weight).std() / weight.std()
    assert error < (0.5 if name in ("gptq-2",) else 0.25) or "ordered" in name


@pytest.mark.parametrize("name", METHODS)
def test_types_and_sizes_are_known_from_headers_alone(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    quantised = method.quantise(random_weight())
    infos = save(quantised.parts, tmp_path / "model.safetensors")
    for info in infos:
        if name == "fp8-whole" or "weight_shape" not in info.name:
            object.__setattr__(info, "source", info.source[:0])  # as if only the header was read
    (found,) = join_quantised(infos, method.settings, tmp_path / "config.json")
    assert found.quant == method.held
    assert found.nbytes == method.held.bytes_for(64 * 128)
    with pytest.raises(FormatError, match="Only the header"):
        found.data()
    stored = sum(part.nbytes for end, part in quantised.parts.items() if "input" not in end)
    shape = 16 if ".weight_shape" in quantised.parts else 0
    assert found.stored_bytes == stored - shape


@pytest.mark.parametrize("block", [(32, 32), (64, 128), (1, 128)])
def test_fp8_has_the_values_of_transformers(block: tuple[int, int], tmp_path: Path) -> None:
    parts = fp8(*block, torch.float32, ".weight_scale_inv")(random_weight()).parts
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    theirs = Fp8Dequantize(None)._dequantize_one(
        parts[".weight"], parts[".weight_scale_inv"], torch.float32
    )
    assert torch.equal(values(join(parts, settings, tmp_path)).view(64, 128), theirs)


def test_mxfp4_of_gpt_oss_has_the_values_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(1, 254, (3, 8, 2), dtype=torch.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found = join({"_blocks": blocks, "_scales": scales}, settings, tmp_path)
    assert (found.name, found.shape, found.quant) == (NAME, (3, 8, 64), MXFP4)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(values(found).view(3, 8, 64), theirs)


def test_all_values_of_eight_bits_are_those_of_torch(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    parts = {".weight": codes, ".weight_scale": torch.ones(())}
    found = values(join(parts, {}, tmp_path)).view(8, 32)
    assert torch.equal(found.nan_to_num(7777), codes.float().nan_to_num(7777))


@pytest.mark.parametrize(
    ("bits", "strategy", "group", "symmetric"),
    [
        (4, "group", 32, True),
        (4, "group", 64, False),
        (4, "channel", 0, True),
        (8, "group", 32, True),
        (3, "group", 32, True),
    ],
)
def test_packed_integers_are_those_of_compressed_tensors(
    bits: int, strategy: str, group: int, symmetric: bool, tmp_path: Path
) -> None:
    """The library packs codes and unpacks them; ours are the values that it gets back."""
    quantization = library.quantization
    compressors = library.compressors
    weight = random_weight()
    args = quantization.QuantizationArgs(
        num_bits=bits, strategy=strategy, group_size=group or None, symmetric=symmetric
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    split = weight.view(64, -1, group or 128)
    scale = (split.abs().amax(-1) / (2 ** (bits - 1) - 1)).half().float()
    zero = torch.randint(-3, 3, scale.shape, dtype=torch.int8)
    state = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(stored, scheme)["weight"]
    parts = {f".{end}": part for end, part in stored.items()}
    parts[".weight_scale"] = scale.half()
    settings = compressed(bits, strategy, "int", group)
    found = join(parts, settings, tmp_path)
    assert found.quant != F32
    assert torch.equal(values(found).view(64, 128), theirs)


@pytest.mark.parametrize("format", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_four_bit_floats_are_those_of_compressed_tensors(format: str, tmp_path: Path) -> None:
    name = format.partition("-")[0]
    method = METHODS[name]
    parts = method.quantise(random_weight()).parts
    args = library.quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group" if name == "nvfp4" else "group",
        group_size=16 if name == "nvfp4" else 32,
        symmetric=True,
    )
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = library.compressors.BaseCompressor.get_value_from_registry(format)
    theirs = compressor.decompress({end[1:]: part for end, part in parts.items()}, scheme)["weight"]
    found = values(join(parts, method.settings, tmp_path)).view(64, 128)
    assert torch.equal(found.to(theirs.dtype), theirs)  # the library gives bfloat16


def test_a_joined_tensor_says_what_the_file_stores(tmp_path: Path) -> None:
    expected = {"fp8-blocks": "fp8", "w4a16": "w4a16", "awq": "awq", "nvfp4": "nvfp4"}
    for name, stored in expected.items():
        method = METHODS[name]
        found = join(method.quantise(random_weight()).parts, method.settings, tmp_path)
        assert isinstance(found, ComposedTensor)
        assert found.stored_type == stored


def test_other_tensors_stay_and_scales_of_activations_go(tmp_path: Path) -> None:
    method = METHODS["fp8-rows"]
    parts = method.quantise(random_weight()).parts
    more = {".norm.weight": torch.ones(4), ".k_scale": torch.ones(1)}
    infos = save(parts | more, tmp_path / "model.safetensors")
    joined = join_quantised(infos, method.settings, tmp_path)
    assert {info.name for info in joined} == {NAME + ".weight", NAME + ".norm.weight"}


@pytest.mark.parametrize("first", [False, True])
def test_targets_of_settings_choose_the_bits_of_a_module(tmp_path: Path, first: bool) -> None:
    settings = compressed(4, "group", "int", 32)
    special = {"targets": ["re:.*up_proj"], "weights": {"num_bits": 8, "group_size": 32}}
    groups = list(settings["config_groups"].values())
    groups = [special, *groups] if first else [*groups, special]
    settings["config_groups"] = {f"group_{at}": group for at, group in enumerate(groups)}
    quantised = packed(8, 32, torch.float16)(random_weight())
    found = join(quantised.parts, settings, tmp_path)
    assert torch.equal(values(found).view(64, 128), quantised.values)
    special["targets"] = ["re:.*down_proj"]  # the module is one of all others
    quantised = packed(4, 32, torch.float16)(random_weight())
    found = join(quantised.parts, settings, tmp_path)
    assert torch.equal(values(found).view(64, 128), quantised.values)


def test_scales_of_several_groups_need_the_size_of_a_group(tmp_path: Path) -> None:
    settings = compressed(4, "group", "int", 32)
    del settings["config_groups"]["group_0"]["weights"]["group_size"]
    quantised = packed(4, 32, torch.float16)(random_weight())
    with pytest.raises(FormatError, match=r"weight_scale is \[64, 4\]"):
        join(quantised.parts, settings, tmp_path)


def without(quantised: Quantised, end: str) -> dict[str, torch.Tensor]:
    return {name: part for name, part in quantised.parts.items() if name != end}


def refusal(parts: dict[str, torch.Tensor], settings: Any, folder: Path) -> str:
    with pytest.raises(FormatError) as caught:
        join(parts, settings, folder).data()
    return f"{caught.value} {caught.value.hint}"


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    four = METHODS["gptq"].quantise(random_weight())
    sym = gptq_settings(4, 32, sym=True)
    wide = {**four.parts, ".scales": four.parts[".scales"][:2]}
    far = packed(4, 32, torch.bfloat16)(random_weight() * 1e-9)
    shuffled = gptq(4, 32, symmetric=True, shuffled=True)(random_weight())
    wrong = gptq(4, 32, symmetric=False)(random_weight())
    for parts, settings, told in (
        ({".weight": torch.ones(2, 2)}, {"quant_method": "bitsandbytes"}, "by 'bitsandbytes'"),
        ({".weight": torch.ones(2, 2)}, [1], "quantization_config is not an object"),
        (four.parts, sym | {"checkpoint_format": "marlin"}, "in the format 'marlin'"),
        (four.parts, sym | {"bits": 5}, "GPTQ weights of 5 bits"),
        (four.parts, sym | {"group_size": 64}, "describe these weights"),
        (four.parts, {"quant_method": "awq", "version": "gemv"}, "the version 'gemv'"),
        (without(four, ".qzeros"), sym, "has no part '.qzeros'"),
        (wide, sym, r".scales is [2, 64], not [4, 64]"),
        (shuffled.parts, sym, '"desc_act": true'),
        (wrong.parts, sym, "its settings promise -8 to 7"),
        (far.parts, compressed(4, "group", "int", 32), "which float16 does not hold"),
        (far.parts, {"quant_method": "compressed-tensors"}, "has None bits"),
    ):
        assert told in refusal(parts, settings, tmp_path)


def test_random_blocks_of_mxfp4_round_trip() -> None:
    stored, exponents, expected = mxfp4_codes(random_weight())
    theirs = convert_moe_packed_tensors(stored[None], exponents[None], dtype=torch.float32)
    assert torch.equal(theirs[0].T, expected)
