"""What loading refuses before it reads a weight."""

from pathlib import Path

import pytest

from headroom.errors import OptionError
from headroom.llm import LLM
from headroom.options import KV_TYPES, PLAN_KV_TYPES


@pytest.mark.parametrize("name", [name for name in PLAN_KV_TYPES if name not in KV_TYPES])
def test_a_cache_type_that_only_plans_know_is_refused_by_name(
    name: str, smollm2_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        LLM(str(smollm2_path), k_type=name, context=64)
    assert str(caught.value) == (
        f"Cached keys in {name} cannot be run yet. Choose from {', '.join(KV_TYPES)}."
    )
