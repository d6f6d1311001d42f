"""Models that transformers makes, in float32 on a GPU: every variant of every family."""

from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from tests.running import run_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# check_all: may be empty, as transformers may be missing
families = pytest.importorskip("tests.families.oracles", exc_type=ImportError)


@pytest.mark.parametrize("name", families.VARIANTS)
def test_logits_in_f32_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    found = families.variant(name)
    text = families.PROMPT + families.PROMPT[::-1]
    checkpoint = open_checkpoint(found.save_safetensors(tmp_path / "m"))
    expected = families.oracle_logits(found.model(), text)
    for pieces in ([48], [17, 1, 1, 29]):
        logits = run_steps(checkpoint, [text], [pieces], device="cuda:0")[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
