"""Stacks of experts in an order of their own: columns first, rows of gate and up in turn."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from headroom.formats.names import Naming
from headroom.formats.quants import MXFP4
from headroom.formats.safetensors import read_safetensors
from headroom.formats.stacks import in_usual_order
from headroom.formats.tensor import ComposedTensor, TensorInfo

NAMING = Naming(
    architecture="test",
    transposed_stacks=("both", "down"),
    alternating_stacks=("both", "both_bias"),
)


def stored(values: torch.Tensor, path: Path) -> TensorInfo:
    save_file({"x": values}, path)
    return read_safetensors(path).tensors["x"]


def test_transposed_matrices_and_rows_in_turn_become_gates_before_ups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gates, ups = torch.randn(2, 3, 6, 4, dtype=torch.bfloat16)
    theirs = torch.stack((gates, ups), dim=2).reshape(3, 12, 4)
    info = stored(theirs.mT.contiguous(), tmp_path / "m.safetensors")
    found = in_usual_order("layers.0.both", info, NAMING)
    assert found.shape == (3, 12, 4)
    ours = torch.from_numpy(found.data()).view(torch.bfloat16).view(3, 12, 4)
    assert torch.equal(ours, torch.cat((gates, ups), dim=1))
    assert (found.stored_type, found.stored_bytes) == ("bf16", info.nbytes)


def test_a_matrix_may_only_be_transposed_and_biases_only_be_in_turn(tmp_path: Path) -> None:
    down = torch.randn(3, 4, 6)
    info = stored(down, tmp_path / "down.safetensors")
    found = in_usual_order("layers.10.down", info, NAMING)
    ours = torch.from_numpy(found.data()).view(torch.float32).view(3, 6, 4)
    assert torch.equal(ours, down.mT)
    biases = torch.randn(3, 8)
    info = stored(biases, tmp_path / "bias.safetensors")
    found = in_usual_order("layers.0.both_bias", info, NAMING)
    ours = torch.from_numpy(found.data()).view(torch.float32).view(3, 8)
    assert torch.equal(ours, torch.cat((biases[:, ::2], biases[:, 1::2]), dim=1))


def test_packed_matrices_have_rows_first_already(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (2, 4, 17), dtype=torch.uint8)
    info = stored(blocks, tmp_path / "m.safetensors")
    packed = ComposedTensor(
        "x", (2, 4, 32), MXFP4, info.path, 0, info.source, (info,), "mxfp4", info.data
    )
    found = in_usual_order("layers.0.both", packed, NAMING)
    ours = torch.from_numpy(found.data()).view(2, 4, 17)
    assert torch.equal(ours, torch.cat((blocks[:, ::2], blocks[:, 1::2]), dim=1))
    assert in_usual_order("layers.0.down", packed, NAMING) is packed


def test_other_tensors_stay_as_they_are(tmp_path: Path) -> None:
    info = stored(torch.randn(2, 4), tmp_path / "m.safetensors")
    assert in_usual_order("layers.0.router", info, NAMING) is info
