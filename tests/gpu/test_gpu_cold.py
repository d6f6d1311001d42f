"""Every family with experts on a GPU, some of them cold: the cases of check_cold_engine."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.kernels.native.module import MODULE
from tests.gpu.check_cold_engine import all_cases, group_of
from tests.gpu.jobs import COLD_GROUPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
]
Works = dict[str, dict[str, Callable[[], str]]]


def grouped(folder: Path) -> Works:
    """All cases by their groups, whose models are written to a folder when they are needed."""
    found: Works = defaultdict(dict)
    for case, work in all_cases(folder):
        found[group_of(case)][case] = work
    return {group: found[group] for group in COLD_GROUPS}


NAMES = [
    pytest.param(group, case, id=case) for group, works in grouped(Path()).items() for case in works
]


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Works:
    """What the cases do, on files of this run."""
    return grouped(tmp_path_factory.mktemp("cold"))


@pytest.mark.parametrize(("name", "case"), NAMES)
def test_cold_experts_do_what_docs_experts_promises(works: Works, name: str, case: str) -> None:
    assert works[name][case]() == ""
