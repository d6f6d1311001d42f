"""Long prompts: memory does not grow with them but by what the cache holds."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf as write_synthesised
from tests.families.family_configs import qwen35
from tests.families.family_gguf import write_gguf

log = logging.getLogger(__name__)
MIB = 1 << 20
TELLS_PEAKS = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the system tells no peaks"
)
# A separate process, whose peak memory is that of this prompt alone.
READ_A_PROMPT = """
import re, sys
from pathlib import Path
import torch
from headroom import LLM, SamplingParams
path, tokens = sys.argv[1], int(sys.argv[2])
settings = dict(context=4160, parallel=1, chunk=128, threads=2, kv_type="f16", dtype=sys.argv[3])
with LLM(path, **settings) as llm:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: loading had its own
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    done = llm.generate([ids], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert done.prompt_tokens == tokens and len(done.token_ids) == 4
    blocks = llm.engine._pipeline._stages[0]._model._blocks
    kv = sum(block._mixer._pages.nbytes for block in blocks if hasattr(block._mixer, "_pages"))
# Not getrusage, whose peak is also that of the parent before this program began.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024, kv)
"""


def peak_bytes(path: Path, tokens: int, dtype: str = "f32") -> tuple[int, int]:
    """Return the peak of a process while it reads a prompt, and the bytes of its cache."""
    command = [sys.executable, "-c", READ_A_PROMPT, str(path), str(tokens), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, kv = map(int, done.stdout.split())
    return peak, kv


@pytest.mark.timeout(300)
@TELLS_PEAKS
def test_a_prompt_of_4096_tokens_needs_no_more_scratch_than_one_of_1024(tmp_path: Path) -> None:
    model = qwen35(
        key_heads=4,
        value_heads=12,
        state_dim=64,
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        max_position_embeddings=8192,
    )
    path = tmp_path / "m.gguf"
    write_gguf(model, path, "Q8_0", fused=False, unused_keys=False)
    short, kv = peak_bytes(path, 1024)
    long, _ = peak_bytes(path, 4096)
    # Pages of the cache are the system's until they are written: 3/4 of them by the long prompt.
    # Read whole instead of in chunks, the two prompts differ by 60 MiB.
    assert long - short < kv + 12 * MIB


# Four layers of the true width: three with recurrent states, one that sees the whole context.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@TELLS_PEAKS
@pytest.mark.parametrize(
    ("family", "size"), [("qwen35", "qwen3.6-27b"), ("qwen35moe", "qwen3.6-35b-a3b")]
)
def test_prompts_of_true_width_need_no_more_scratch_if_they_are_longer(
    family: str, size: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_synthesised(Source(find_recipe(family, size, layers=4), 0), path, "q4_k_m")
    short, kv = peak_bytes(path, 1024, "int8")
    long, _ = peak_bytes(path, 4096, "int8")
    log.info("%s: peaks of %d and %d bytes, a cache of %d", size, short, long, kv)
    # One layer's answer for 3,072 more rows would be 60 MiB in the dense model, 24 in the other.
    assert long - short < kv + 12 * MIB
