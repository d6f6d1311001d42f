"""Quantised safetensors: a weight that lies in several tensors, joined to one.

A file of FP8, AWQ or GPTQ and so on holds a weight as codes and scales, each a tensor. Here they
become one tensor of the type that holds exactly its values: blocks of GGUF where those have the
same codes and scales, else float32. Types follow from headers alone, so that a plan knows them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headroom.errors import FormatError
from headroom.formats.quants import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    I8,
    I32,
    MXFP4,
    U8,
    QuantType,
)
from headroom.formats.repack import (
    CODES,
    E2M1_VALUES,
    E4M3_VALUES,
    pack_blocks,
    pack_floats,
    pack_mxfp4,
    read_array,
    read_scales,
    spread_scales,
    unpack_fields,
)
from headroom.formats.tensor import ComposedTensor, TensorInfo

if TYPE_CHECKING:
    from headroom.formats.repack import Array
    from headroom.formats.tensor import Bytes

METHODS = (
    "fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "auto-round", "mxfp4", "modelopt",
)  # fmt: skip
# Parts beside a weight's codes, and scales of activations and caches, which stay floats here.
_PART = re.compile(
    r"(?P<module>.+?)(_scales|\.(weight_(scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)"
    r"|qzeros|scales|g_idx|activation_scale|output_scale|input_\w*(scale|scale_ub|zero_point)))"
)
_CACHE_SCALE = re.compile(r".+\.[qkv]_scale")
_BLOCK = 32  # values that share a scale in blocks of whole numbers and of MXFP4
_NVFP4_GROUP = 16
_FP8_BLOCK = (128, 128)  # where the settings do not say
_SCALE_TYPES = (F16, BF16, F32)
# Which nibble of an AWQ word holds each of its eight rows.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Module:
    """A module's tensors, found by the ends of their names."""

    name: str
    tensors: Mapping[str, TensorInfo]  # of the whole model
    path: Path  # of the settings

    def part(self, end: str) -> TensorInfo | None:
        return self.tensors.get(self.name + end)

    def need(self, end: str, types: Sequence[QuantType], dimensions: int) -> TensorInfo:
        """Return a part that must be there, of one of these types."""
        if (info := self.part(end)) is None:
            raise FormatError(f"{self.path}: {self.name} has no part {end!r}.")
        if info.quant not in types or len(info.shape) != dimensions:
            raise self.wrong(end, f"is {info.quant} {list(info.shape)}")
        return info

    def check(self, end: str, *sizes: int) -> TensorInfo:
        """Return a part that must have these sizes."""
        info = self.tensors[self.name + end]
        if info.shape != sizes:
            raise self.wrong(end, f"is {list(info.shape)}, not {list(sizes)}")
        return info

    def wrong(self, end: str, how: str) -> FormatError:
        return FormatError(
            f"{self.path}: {self.name}{end} {how}, which its quantisation does not explain.",
            hint="quantization_config in config.json does not describe these weights.",
        )


@dataclass(frozen=True, slots=True)
class _Joined:
    """A weight as one tensor."""

    shape: tuple[int, ...]
    quant: QuantType
    parts: tuple[TensorInfo, ...]  # the codes first
    compose: Callable[[], "Bytes"]
    ending: str = ".weight"


@dataclass(frozen=True, slots=True)
class _Integers:
    """Whole numbers with a scale for each group of columns; how their parts are read."""

    module: _Module
    shape: tuple[int, int]
    bits: int
    group: int  # columns that share a scale
    codes: Callable[[], "Array"]  # unsigned [rows, columns]
    scales: Callable[[], "Array"]  # float32 [rows, groups]
    zeros: Callable[[], "Array"] | None  # codes that mean 0, [rows, groups]; None: the middle one
    index: TensorInfo | None = None  # the group of each column, where they are not in order


def join_quantised(tensors: Sequence[TensorInfo], settings: object, path: Path) -> list[TensorInfo]:
    """Return a model's tensors with each quantised weight as one of them.

    `settings` is what config.json, at `path`, says of the quantisation.
    """
    if not isinstance(settings, Mapping):
        raise FormatError(f"{path}: quantization_config is not an object.")
    method = _method(settings, path)
    by_name = {info.name: info for info in tensors}
    kept: list[TensorInfo] = []
    joined: set[str] = set()
    for info in tensors:
        found = _join(info, by_name, settings, path)
        if found is None:
            kept.append(info)
            continue
        module, weight = found
        joined.add(module.name)
        first = weight.parts[0]
        kept.append(
            ComposedTensor(
                name=module.name + weight.ending,
                shape=weight.shape,
                quant=weight.quant,
                path=first.path,
                offset=first.offset,
                source=first.source,
                parts=weight.parts,
                method=_kind(first, weight, method),
                compose=weight.compose,
            )
        )
    return [info for info in kept if not _is_part(info.name, joined)] if joined else kept


def _method(settings: Settings, path: Path) -> str:
    """Return the method of quantisation that the settings name; "" where they name none."""
    method = settings.get("quant_method", "modelopt" if "quant_algo" in settings else "")
    if not settings or method in METHODS:
        return str(method)
    raise FormatError(
        f"{path}: the weights are quantised by {method!r}, which is not supported.",
        hint=f"Supported: {', '.join(METHODS)}. Or choose a GGUF file of the model.",
    )


def _kind(codes: TensorInfo, weight: _Joined, method: str) -> str:
    """Return what people call a quantisation."""
    if codes.quant == F8_E4M3:
        return "fp8"
    if codes.quant == U8:
        return "mxfp4" if weight.quant == MXFP4 else "nvfp4"
    return "int8" if codes.quant == I8 else "w4a16" if method == "compressed-tensors" else method


def _is_part(name: str, joined: set[str]) -> bool:
    """Whether a tensor is a part of a joined weight, or a scale of activations or of a cache."""
    part = _PART.fullmatch(name)
    return (part is not None and part["module"] in joined) or bool(_CACHE_SCALE.fullmatch(name))


def _join(
    info: TensorInfo, tensors: Mapping[str, TensorInfo], settings: Settings, path: Path
) -> tuple[_Module, _Joined] | None:
    """Return the weight whose codes a tensor holds; None for any other tensor."""
    name = info.name
    if name.endswith("_blocks") and info.quant == U8:
        module = _Module(name.removesuffix("_blocks"), tensors, path)
        return module, _mxfp4_stack(module)
    for end, join in (
        (".qweight", _gptq_or_awq),
        (".weight_packed", _compressed),
        (".weight", _plain_codes),
    ):
        if name.endswith(end):
            module = _Module(name.removesuffix(end), tensors, path)
            found = join(module, info, settings)
            return None if found is None else (module, found)
    return None


def _gptq_or_awq(module: _Module, codes: TensorInfo, settings: Settings) -> _Joined:
    packing = str(settings.get("packing_format", ""))
    if settings.get("quant_method") == "awq" or "awq" in packing:
        return _awq(module, settings)
    return _gptq(module, settings)


def _compressed(module: _Module, codes: TensorInfo, settings: Settings) -> _Joined:
    """Return a weight of compressed-tensors whose codes are smaller than a byte."""
    if codes.quant == I32:
        return _packed_integers(module, settings)
    scale = module.need(".weight_scale", (U8, F8_E4M3), 2)
    if scale.quant == U8:
        return _mxfp4(module)
    whole = module.need(".weight_global_scale", (F32,), 1)
    return _nvfp4(module, ".weight_packed", whole, divided=True)


def _plain_codes(module: _Module, codes: TensorInfo, settings: Settings) -> _Joined | None:
    """Return a weight whose codes have its name; None where it is not quantised."""
    scale = module.part(".weight_scale_inv") or module.part(".weight_scale")
    if codes.quant not in (F8_E4M3, I8, U8) or scale is None or len(codes.shape) != 2:
        return None
    if codes.quant == U8:
        whole = module.part(".weight_scale_2")
        if whole is None or prod(whole.shape) != 1:
            return None
        return _nvfp4(module, ".weight", whole, divided=False)
    block = _scale_block(module, codes.shape, scale, settings)
    if codes.quant == I8:
        return _bytes(module, codes, scale, block)
    rows, columns = codes.shape
    compose = partial(_compose_fp8, codes, scale, block)
    return _Joined((rows, columns), F32, (codes, scale), compose)


def _bytes(
    module: _Module, codes: TensorInfo, scale: TensorInfo, block: tuple[int, int]
) -> _Joined:
    """Return a weight of signed bytes."""
    rows, columns = codes.shape
    zero = module.part(".weight_zero_point")
    group = min(block[1], columns)
    if block[0] not in (1, rows) or scale.quant not in _SCALE_TYPES:
        raise module.wrong(".weight_scale", f"is {scale.quant} {list(scale.shape)}")
    if zero is not None and (zero.quant != I8 or zero.shape != scale.shape):
        raise module.wrong(".weight_zero_point", f"is {zero.quant} {list(zero.shape)}")
    groups = -(-columns // group)
    integers = _Integers(
        module,
        (rows, columns),
        8,
        group,
        codes=lambda: read_array(codes).astype("i2") + 128,
        scales=lambda: _wide(read_scales(scale), rows, groups),
        zeros=None
        if zero is None
        else lambda: _wide(read_array(zero).astype("i2"), rows, groups) + 128,
    )
    parts = (codes, scale) if zero is None else (codes, scale, zero)
    return _of_integers(integers, parts, scale, symmetric=zero is None)


def _packed_integers(module: _Module, settings: Settings) -> _Joined:
    """Return a weight of compressed-tensors in words of 32 bits."""
    packed = module.need(".weight_packed", (I32,), 2)
    scale = module.need(".weight_scale", _SCALE_TYPES, 2)
    weights = _weight_settings(module, settings)
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise module.wrong(".weight_packed", f"has {bits!r} bits")
    rows, groups = packed.shape[0], scale.shape[1]
    group = size if isinstance(size, int) and size > 0 else 0  # 0: all columns
    if groups > 1 and not group:
        raise module.wrong(".weight_scale", f"is {list(scale.shape)}")
    columns = groups * group if group and groups > 1 else packed.shape[1] * 32 // bits
    if packed.shape != (rows, -(-columns * bits // 32)) or scale.shape[0] != rows:
        raise module.wrong(".weight_packed", f"is {list(packed.shape)}")
    zero, index = module.part(".weight_zero_point"), module.part(".weight_g_idx")
    if zero is not None:
        module.need(".weight_zero_point", (I32,), 2)
        module.check(".weight_zero_point", -(-rows * bits // 32), groups)
    if index is not None:
        module.need(".weight_g_idx", (I32,), 1)
        module.check(".weight_g_idx", columns)
    integers = _Integers(
        module,
        (rows, columns),
        bits,
        group if groups > 1 else columns,
        codes=lambda: _fields(packed, bits)[:, :columns],
        scales=lambda: read_scales(scale),
        zeros=None if zero is None else lambda: _fields(zero, bits, down=True)[:, :rows].T,
        index=index,
    )
    parts = tuple(part for part in (packed, scale, zero, index) if part is not None)
    return _of_integers(integers, parts, scale, symmetric=zero is None)


def _gptq(module: _Module, settings: Settings) -> _Joined:
    """Return a weight of GPTQ: words run down the columns of the transposed weight."""
    bits, layout = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8) or layout not in ("gptq", "gptq_v2"):
        raise FormatError(
            f"{module.path}: GPTQ weights of {bits!r} bits in the format {layout!r} are not read.",
            hint="Supported: 2, 3, 4 and 8 bits; the formats gptq and gptq_v2.",
        )
    packed = module.need(".qweight", (I32,), 2)
    rows, columns = packed.shape[1], packed.shape[0] * 32 // bits
    group = _group(settings, columns)
    groups = -(-columns // group)
    scale = module.need(".scales", _SCALE_TYPES, 2)
    zero = module.need(".qzeros", (I32,), 2)
    module.check(".scales", groups, rows)
    module.check(".qzeros", groups, -(-rows * bits // 32))
    index = module.part(".g_idx")
    if index is not None:
        module.need(".g_idx", (I32,), 1)
        module.check(".g_idx", columns)
    less = 0 if layout == "gptq_v2" else 1  # zeros are stored less one
    ordered = settings.get("desc_act") is True

    def codes() -> "Array":
        if index is not None and not ordered:
            _check_order(module, index, group)
        return _fields(packed, bits, down=True)

    integers = _Integers(
        module,
        (rows, columns),
        bits,
        group,
        codes=codes,
        scales=lambda: read_scales(scale).T,
        zeros=lambda: (_fields(zero, bits)[:, :rows].T + less) & ((1 << bits) - 1),
        index=index if ordered else None,
    )
    parts = tuple(part for part in (packed, scale, zero, index) if part is not None)
    return _of_integers(integers, parts, scale, symmetric=settings.get("sym") is True)


def _awq(module: _Module, settings: Settings) -> _Joined:
    """Return a weight of AWQ: a word holds eight rows of a column, in an order of its own."""
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise FormatError(
            f"{module.path}: AWQ weights of {bits!r} bits in the version {version!r} are not read.",
            hint="Supported: 4 bits, the version gemm.",
        )
    packed = module.need(".qweight", (I32,), 2)
    columns, rows = packed.shape[0], packed.shape[1] * 8
    group = _group(settings, columns)
    groups = -(-columns // group)
    scale = module.need(".scales", _SCALE_TYPES, 2)
    zero = module.need(".qzeros", (I32,), 2)
    module.check(".scales", groups, rows)
    module.check(".qzeros", groups, packed.shape[1])
    integers = _Integers(
        module,
        (rows, columns),
        4,
        group,
        codes=lambda: _awq_fields(packed).T,
        scales=lambda: read_scales(scale).T,
        zeros=lambda: _awq_fields(zero).T,
    )
    return _of_integers(integers, (packed, scale, zero), scale, symmetric=False)


def _of_integers(
    integers: _Integers, parts: tuple[TensorInfo, ...], scale: TensorInfo, *, symmetric: bool
) -> _Joined:
    """Return a weight of whole numbers in the narrowest blocks that hold its codes, or in float32.

    Blocks have a float16 scale for 32 columns. A bfloat16 scale is nearly always a float16, too,
    which is checked when the weight is read.
    """
    half, most = 1 << integers.bits - 1, (1 << integers.bits) - 1
    low, high = (-half, half - 1) if symmetric else (-most, most)
    fits = [quant for quant, codes in CODES.items() if codes[0] <= low and high <= codes[1]]
    columns = integers.shape[1]
    whole = integers.group % _BLOCK == 0 and columns % _BLOCK == 0
    blocks = fits and whole and integers.index is None and scale.quant in (F16, BF16)
    quant = fits[0] if blocks else F32
    return _Joined(integers.shape, quant, parts, partial(_compose_integers, integers, quant))


def _compose_integers(integers: _Integers, quant: QuantType) -> "Bytes":
    columns, group = integers.shape[1], integers.group
    codes, scales = integers.codes(), integers.scales()
    zeros = np.array([[1 << integers.bits - 1]]) if integers.zeros is None else integers.zeros()
    zeros = np.broadcast_to(zeros, scales.shape)
    index = np.arange(columns) // group
    if integers.index is not None:
        index = read_array(integers.index)
        if index.min() < 0 or index.max() >= scales.shape[1]:
            raise integers.module.wrong("", f"has columns of group {index.max()}")
    signed = codes.astype("i2") - zeros.astype("i2")[:, index]
    if quant == F32:
        return pack_floats(signed.astype("f4") * scales[:, index])
    blocks = index[::_BLOCK]
    return pack_blocks(signed, scales[:, blocks], quant, integers.module.name)


def _compose_fp8(codes: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> "Bytes":
    rows, columns = codes.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = spread_scales(read_scales(scale).reshape(grid), (rows, columns), block)
    return pack_floats(E4M3_VALUES[read_array(codes)] * scales)


def _nvfp4(module: _Module, end: str, whole: TensorInfo, *, divided: bool) -> _Joined:
    """Return a weight of NVFP4: an 8-bit scale for 16 columns, and a scale of all of them.

    `divided`: the 8-bit scales are divided by that of the whole weight, not multiplied.
    """
    codes = module.need(end, (U8,), 2)
    scale = module.need(".weight_scale", (F8_E4M3,), 2)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    module.check(".weight_scale", rows, columns // _NVFP4_GROUP)
    if prod(whole.shape) != 1 or whole.quant != F32 or columns % _NVFP4_GROUP:
        raise module.wrong(end, f"is {list(codes.shape)}")

    def compose() -> "Bytes":
        one = read_scales(whole).reshape(())
        scales = read_scales(scale)
        scales = scales / one if divided else scales * one
        wide = spread_scales(scales, (rows, columns), (1, _NVFP4_GROUP))
        return pack_floats(E2M1_VALUES[_fields(codes, 4)] * wide)

    return _Joined((rows, columns), F32, (codes, scale, whole), compose)


def _mxfp4(module: _Module) -> _Joined:
    """Return a weight of MXFP4 as compressed-tensors has it."""
    codes = module.need(".weight_packed", (U8,), 2)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if columns % _BLOCK:
        raise module.wrong(".weight_packed", f"is {list(codes.shape)}")
    scale = module.check(".weight_scale", rows, columns // _BLOCK)
    compose = partial(_compose_mxfp4, codes, scale)
    return _Joined((rows, columns), MXFP4, (codes, scale), compose)


def _mxfp4_stack(module: _Module) -> _Joined:
    """Return MXFP4 weights as gpt-oss has them: all experts' blocks, and all their scales."""
    codes = module.tensors[module.name + "_blocks"]
    scale = module.need("_scales", (U8,), max(0, len(codes.shape) - 1))
    *outer, groups, size = codes.shape or (0,)
    if not outer or size * 2 != _BLOCK or scale.shape != (*outer, groups):
        raise module.wrong("_blocks", f"is {list(codes.shape)}")
    compose = partial(_compose_mxfp4, codes, scale)
    return _Joined((*outer, groups * _BLOCK), MXFP4, (codes, scale), compose, ending="")


def _compose_mxfp4(codes: TensorInfo, scale: TensorInfo) -> "Bytes":
    exponents = read_array(scale)
    return pack_mxfp4(read_array(codes).reshape(*exponents.shape, _BLOCK // 2), exponents)


def _scale_block(
    module: _Module, shape: tuple[int, ...], scale: TensorInfo, settings: Settings
) -> tuple[int, int]:
    """Return how many rows and columns of a matrix share a scale."""
    rows, columns = shape
    if prod(scale.shape) == 1:
        return rows, columns
    if scale.shape in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale.shape) == 2:
        groups = scale.shape[1]
        if scale.shape[0] == rows and groups and columns % groups == 0:
            return 1, columns // groups
        block = _block_setting(module, settings)
        if scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    raise module.wrong("", f"has scales {list(scale.shape)} of a weight {list(shape)}")


def _block_setting(module: _Module, settings: Settings) -> tuple[int, int]:
    size = settings.get("weight_block_size") or _weight_settings(module, settings).get(
        "block_structure"
    )
    if size is None:
        return _FP8_BLOCK
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise module.wrong("", f"has blocks of {size!r}")


def _weight_settings(module: _Module, settings: Settings) -> Settings:
    """Return what compressed-tensors say of a module's weights; {} where they say nothing."""
    groups = settings.get("config_groups")
    found: Settings = {}
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        targets = group.get("targets")
        targets = targets if isinstance(targets, list) else []
        if any(_names(str(target), module) for target in targets):
            return weights
        if not found or "Linear" in targets:
            found = weights
    return found


def _names(target: str, module: _Module) -> bool:
    """Whether a target of settings means a module by its name; a class as "Linear" does not."""
    if not target.startswith("re:"):
        return target == module.name
    try:
        return re.match(target[3:], module.name) is not None
    except re.error as error:
        raise FormatError(f"{module.path}: {target!r} is no expression: {error}.") from error


def _group(settings: Settings, columns: int) -> int:
    """Return how many columns share a scale by `group_size`, where -1 means all."""
    group = settings.get("group_size", 128)
    return group if type(group) is int and group > 0 else max(columns, 1)


def _check_order(module: _Module, index: TensorInfo, group: int) -> None:
    if (read_array(index) != np.arange(index.shape[0]) // group).any():
        raise FormatError(
            f"{module.path}: the columns of {module.name} are in another order (act-order), but "
            "desc_act is not true.",
            hint='Set "desc_act": true in quantization_config.',
        )


def _fields(info: TensorInfo, bits: int, *, down: bool = False) -> "Array":
    """Return the fields of words; `down`: words run down the columns, which become rows."""
    words = read_array(info)
    return unpack_fields(words.T if down else words, bits)


def _awq_fields(info: TensorInfo) -> "Array":
    fields = _fields(info, 4)
    return fields.reshape(len(fields), -1, 8)[..., _AWQ_ORDER].reshape(len(fields), -1)


def _wide(values: "Array", rows: int, groups: int) -> "Array":
    """Return one value for each row and group, from fewer that hold for all."""
    return np.broadcast_to(values.reshape(-1, groups if values.ndim == 2 else 1), (rows, groups))
