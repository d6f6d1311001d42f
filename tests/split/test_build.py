"""Models with caches of every type."""

from pathlib import Path

import pytest

from headroom.engine.request import SamplingParams
from headroom.llm import LLM
from headroom.options import KV_TYPES


@pytest.mark.parametrize("name", KV_TYPES[-4:])  # the others run in every other test
def test_a_model_runs_with_every_packed_cache_type(name: str, smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
    with LLM(str(smollm2_path), k_type=name, v_type="q4_1", context=64, threads=1) as llm:
        assert llm.generate([[5, 6, 7]], params)[0].generated_tokens == 3
