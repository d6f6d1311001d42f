"""Synthesised GGUF files: other readers agree, values are sane, and the planner knows them."""

import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from headroom.errors import OptionError
from headroom.families.dims import Dims
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import FAMILIES, KNOWN, NAMINGS, read_dims
from headroom.families.synth.blocks import SPREAD, constant_bytes, random_bytes, random_source
from headroom.families.synth.recipe import cut, find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import WriteSettings, gguf_header, gguf_table, write_gguf
from headroom.families.tables import tensor_types
from headroom.formats.gguf import parse_gguf
from headroom.formats.mixes import MIXES, find_mix
from headroom.formats.quants import Q8_0, QuantType
from headroom.formats.read_header import gguf_header as header_of
from headroom.plan.known import known_shape
from headroom.plan.sources import find_shape, header_shape

TINY_SIZES = [(name, size) for name, found in FAMILIES.items() for size in found.synthesis.tiny]


def synthesise(path: Path, family: str, size: str = "tiny", mix: str = "q4_k_m") -> Path:
    write_gguf(Source(find_recipe(family, size), 1), path, mix)
    return path


def as_read(dims: Dims) -> Dims:
    """Return the dimensions as a file has them: without experts, none are fused."""
    return replace(dims, fused_experts=dims.fused_experts and dims.experts > 0)


@pytest.mark.parametrize(("family", "size"), TINY_SIZES)
def test_the_gguf_package_reads_names_shapes_and_types(
    family: str, size: str, tmp_path: Path
) -> None:
    path = synthesise(tmp_path / "m.gguf", family, size)
    read = {
        t.name: (tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.n_bytes)
        for t in gguf.GGUFReader(path).tensors
    }
    table = gguf_table(find_recipe(family, size), "q4_k_m")
    assert read == {e.name: (e.shape, e.quant.ggml_id, e.nbytes) for e in table}


@pytest.mark.parametrize(("family", "size"), TINY_SIZES)
def test_the_header_gives_back_the_dimensions(family: str, size: str, tmp_path: Path) -> None:
    recipe = find_recipe(family, size)
    header = open_header(synthesise(tmp_path / "m.gguf", family, size, "q8_0"))
    assert read_dims(header) == as_read(recipe.dims)
    weights = find_shape(str(tmp_path / "m.gguf"), tmp_path).weight_bytes
    assert 0 < weights <= sum(entry.nbytes for entry in gguf_table(recipe, "q8_0"))


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_of_true_size_has_exactly_the_tensors_that_the_planner_counts(name: str) -> None:
    dims = KNOWN[name]
    recipe = find_recipe(dims.architecture, name)
    raw = gguf_header(recipe, "q4_k_m")
    size = len(raw) + sum(entry.nbytes + 32 for entry in gguf_table(recipe, "q4_k_m"))
    path = Path("x.gguf")
    file = parse_gguf(memoryview(raw), path, size)
    planned = tensor_types(dims, find_mix("q4_k_m"))
    found = {key: (info.shape, info.quant) for key, info in file.tensors.items()}
    assert found == planned
    header = header_of([file], path, NAMINGS)
    assert read_dims(header) == as_read(dims)
    assert header_shape(header).weight_bytes == known_shape(f"{name}:q4_k_m").weight_bytes


@pytest.mark.parametrize("quant", [*SPREAD], ids=str)
def test_packed_values_have_the_wanted_standard_deviation(quant: QuantType) -> None:
    raw = random_bytes(quant, 1 << 19, 0.01, random_source(3))
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(quant.ggml_id))
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.01, rel=0.02)
    assert abs(values.mean()) < 1e-4
    assert abs(values).max() < 0.05


@pytest.mark.parametrize("mix", MIXES)
def test_values_of_every_mix_are_finite_and_spread_by_their_width(mix: str, tmp_path: Path) -> None:
    path = synthesise(tmp_path / "m.gguf", "qwen35moe", mix=mix)
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
        if "ffn_up" in tensor.name or "attn_q." in tensor.name:
            assert values.std() == pytest.approx(0.5 / values.shape[-1] ** 0.5, rel=0.05)
        if tensor.name.endswith("_norm.weight"):
            assert values.mean() == pytest.approx(1, abs=0.1)
        if tensor.name.endswith("ssm_a"):
            assert values.max() <= -1


def test_blocks_of_q8_0_never_hold_minus_128() -> None:
    blocks = random_bytes(Q8_0, 1 << 18, 0.01, random_source(1)).reshape(-1, 34)
    assert blocks[:, 2:].view(np.int8).min() == -127


@pytest.mark.parametrize("quant", [q for q in SPREAD if q.name != "mxfp4"], ids=str)
def test_a_constant_block_holds_one_number(quant: QuantType) -> None:
    kind = gguf.GGMLQuantizationType(quant.ggml_id)
    values = gguf.quants.dequantize(constant_bytes(quant, 3.0), kind)
    assert values == pytest.approx(np.full(quant.block, 3.0), rel=1e-3)


def test_the_same_seed_gives_the_same_file_whatever_the_threads(tmp_path: Path) -> None:
    recipe = find_recipe("laguna", "tiny")
    for name, seed, threads in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1)):
        write_gguf(Source(recipe, seed), tmp_path / name, "q4_k_m", WriteSettings(threads))
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again
    assert first != other
    assert not list(tmp_path.glob(".*"))


def test_experts_of_a_stack_differ(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(synthesise(tmp_path / "m.gguf", "qwen3moe", mix="f32"))
    stack = checkpoint.tensors["layers.0.ffn.experts.up"]
    first = Source(find_recipe("qwen3moe", "tiny"), 1).floats(
        "blk.0.ffn_up_exps.weight", stack.shape
    )
    assert prod(stack.shape) == first.size
    assert abs(np.corrcoef(first[0].ravel(), first[1].ravel())[0, 1]) < 0.05


def test_fewer_layers_keep_the_pattern_and_a_layer_to_read_from() -> None:
    qwen = cut(KNOWN["qwen3.6-35b-a3b"], 5)
    assert qwen.kinds == ("recurrent",) * 3 + ("full", "recurrent")
    gemma = cut(KNOWN["gemma-4-e4b"], 12)
    assert (gemma.layers, gemma.shared_kv_layers) == (12, 6)
    assert gemma.kinds[-1] == "full"


def test_unknown_families_sizes_and_layers_are_refused_with_what_there_is() -> None:
    with pytest.raises(OptionError, match=r"'gpt' is no model family. Families: llama, qwen3,"):
        find_recipe("gpt", "tiny")
    with pytest.raises(OptionError, match=r"'9b' is no size of qwen3. Sizes: tiny, qwen3-0.6b."):
        find_recipe("qwen3", "9b")
    with pytest.raises(OptionError, match=r"--layers is 9; the model has 4 layers. Choose 1 to 4."):
        find_recipe("llama", "tiny", 9)


def test_writing_needs_neither_torch_nor_the_gguf_package() -> None:
    program = (
        "import sys\n"
        "import headroom.families.synth.write\n"
        "print([name for name in ('torch', 'gguf', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
