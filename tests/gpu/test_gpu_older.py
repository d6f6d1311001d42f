"""What older GPUs run, on the one at hand: the cases of check_older.py, one test each."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu import check_older
from tests.gpu.older import as_older
from tests.gpu.test_gpu_kernels import assert_passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OLDER = {75: dict(check_older.checks(75)), 86: dict(check_older.checks(86))}


@pytest.fixture(scope="module", params=OLDER)
def sm(request: pytest.FixtureRequest) -> Iterator[int]:
    """An older GPU, as long as its tests run."""
    with as_older(request.param):
        yield request.param


@pytest.mark.parametrize(
    "name", [*OLDER[75], *(name for name in OLDER[86] if name not in OLDER[75])]
)
def test_a_case_agrees_with_the_reference(name: str, sm: int) -> None:
    check: Callable[[], object] | None = OLDER[sm].get(name)
    if check is None:
        pytest.skip("is of another GPU")
    assert_passes(check)
