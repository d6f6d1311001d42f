"""Files of every GGUF type run, also those of types that no fast kernel reads."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headroom.errors import PlanError
from headroom.families.files import open_checkpoint
from headroom.formats.quants import Q8_K, QUANTS, QuantType
from headroom.kernels.types import PRODUCT_TYPES
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from tests.families import family_configs
from tests.families.family_gguf import from_gguf, read_gguf, write_gguf
from tests.families.oracles import PROMPT, oracle_logits
from tests.running import run_steps

TEXT = PROMPT + PROMPT[::-1]
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows of whole blocks of 256 values
GGML_ONLY = ("q1_0", "q2_0")  # the gguf package does not decode them
RARE_TYPES = [
    quant
    for quant in QUANTS
    if quant.runs and quant not in PRODUCT_TYPES | {Q8_K} and quant.name not in GGML_ONLY
]
# Where a block has its float16 scales; of nvfp4 scales are bytes, of iq1_m nibbles of others.
SCALES = {
    "q2_k": (80, 82),
    "q3_k": (108,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "nvfp4": (),
    "iq1_m": (),
}
SPREAD = 0.05  # standard deviation of a random tensor's values


def random_blocks(values: Any, quant: QuantType) -> Any:
    """Return bytes of a tensor's shape that stand for small values, whatever the tensor had."""
    kind = gguf.GGMLQuantizationType(quant.ggml_id)
    rows, columns = values.shape
    blocks = blocks_with_scale(rows * columns // quant.block, quant, 0.002)
    spread = float(gguf.quants.dequantize(blocks, kind).std())
    return blocks_with_scale(len(blocks), quant, 0.002 * SPREAD / spread).reshape(rows, -1)


def blocks_with_scale(count: int, quant: QuantType, scale: float) -> Any:
    """Return random blocks that have a scale of this size."""
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (count, quant.block_bytes), dtype=np.uint8)
    half = np.array([scale], dtype=np.float16)
    for offset in SCALES.get(quant.name, (0,)):
        blocks[:, offset : offset + 2] = half.view(np.uint8)
    if quant.name == "nvfp4":
        blocks[:, :4] = rng.integers(8, 24, (count, 4))  # exponents of 2^-6 to 2^-4
    if quant.name == "iq1_m":
        for at in range(4):  # nibbles of a float16 scale, in the high bytes of four numbers
            nibble = int(half.view(np.uint16)[0]) >> 4 * at & 15
            blocks[:, 49 + 2 * at] = blocks[:, 49 + 2 * at] & 15 | nibble << 4
    return blocks


@pytest.fixture(params=RARE_TYPES, ids=str)
def quant(request: pytest.FixtureRequest) -> QuantType:
    found: QuantType = request.param
    return found


@pytest.fixture
def path(quant: QuantType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small dense model whose matrices have random blocks of a type."""
    kind, quantise = gguf.GGMLQuantizationType(quant.ggml_id), gguf.quants.quantize

    def stand_in(values: Any, wanted: Any) -> Any:
        return random_blocks(values, quant) if wanted == kind else quantise(values, wanted)

    monkeypatch.setattr(gguf.quants, "quantize", stand_in)
    written = tmp_path / "m.gguf"
    model = family_configs.llama(**WIDE)
    write_gguf(model, written, quant.name.upper(), fused=False, unused_keys=False)
    return written


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_those_of_the_dequantised_values(
    path: Path, quant: QuantType, kernels: str
) -> None:
    checkpoint = open_checkpoint(path)
    assert quant in {info.quant for info in checkpoint.tensors.values()}
    logits = run_steps(checkpoint, [TEXT], [[40, 1, 1, 6]], kernels=kernels)[0]
    model = family_configs.llama(**WIDE)
    model.load_state_dict(from_gguf(model, read_gguf(path)), strict=False)
    expected = oracle_logits(model, TEXT)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_such_weights_are_unpacked_on_a_cpu_and_refused_elsewhere(
    path: Path, quant: QuantType
) -> None:
    shape = describe(open_checkpoint(path)).shape
    assert shape.unread_types == (quant.name,)
    cpu = Options(context=256, device="cpu", ram="2GiB")
    assert make_plan([shape], plan_devices(cpu), cpu).settings.weights == "unpacked"
    for more, told in (
        ({"device": "24GiB"}, f"weights of {quant.name}, which no kernel of a GPU reads"),
        ({"weights": "packed"}, f"weights of {quant.name}, which no product reads packed"),
        ({"dtype": "int8"}, "Leave out --dtype int8"),
    ):
        options = Options(**{"context": 256, "device": "cpu", "ram": "2GiB"} | more)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=told):
            make_plan([shape], plan_devices(options), options)
