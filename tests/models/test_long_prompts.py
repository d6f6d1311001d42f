"""Long prompts through recurrent layers: memory does not grow with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.family_configs import qwen35
from tests.family_gguf import write_gguf

MIB = 1 << 20
# A process of its own, whose peak is that of this prompt alone.
READ_A_PROMPT = """
import re, sys
from pathlib import Path
import torch
from headroom import LLM, SamplingParams
path, tokens = sys.argv[1], int(sys.argv[2])
settings = dict(context=4160, parallel=1, chunk=int(sys.argv[3]), threads=2, kv_type="f16")
with LLM(path, **settings) as llm:
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    done = llm.generate([ids], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert done.prompt_tokens == tokens and len(done.token_ids) == 4
    blocks = llm.engine._pipeline._stage._model._blocks
    kv = sum(block._mixer._pages.nbytes for block in blocks if hasattr(block._mixer, "_pages"))
# Not getrusage, whose peak is also that of the parent before this program began.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024, kv)
"""


def peak_bytes(path: Path, tokens: int, chunk: int = 128) -> tuple[int, int]:
    """Return the peak of a process that reads a prompt, and the bytes of its cache."""
    command = [sys.executable, "-c", READ_A_PROMPT, str(path), str(tokens), str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, kv = map(int, done.stdout.split())
    return peak, kv


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
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
