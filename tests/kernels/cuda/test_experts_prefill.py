"""Experts of many rows: picks sorted by expert, and groups of experts, CUDA kernels on the CPU."""

import pytest
import torch

from headroom.kernels.cuda import experts_prefill
from headroom.kernels.cuda.experts_prefill import sort_picks
from tests.gpu import check_experts
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("gpu_products"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(check_experts, "DEVICE", "cpu")


@pytest.mark.parametrize("each", [1, 2, 5])
def test_experts_in_groups_agree_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: each)
    assert check_experts.check(("q4_k", "q4_k", "q6_k"), (5, 256, 256), 9, 2, "silu")


def test_picks_come_sorted_by_expert_and_each_knows_its_place() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    picks = sort_picks(ids, 5)
    assert picks.ends.tolist() == [2, 2, 4, 5, 5]
    assert picks.rows.tolist() == [0, 2, 0, 1, 2, 1]  # in their order within an expert
    assert picks.places.tolist() == [[2, 0], [5, 3], [1, 4]]


def test_a_group_has_its_own_picks_first() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    sorted_ = experts_prefill.sort_in_groups(ids, 5, 2)
    group = experts_prefill.expert_group(sorted_, 2, 2)
    assert (group.first, group.last) == (2, 3)
    assert group.start is not None
    assert group.start.tolist() == [2]
    assert group.ends.tolist() == [2, 3]
    assert (group.most, group.among, group.size) == (6, 5, 2)
    x, out = torch.randn(3, 24).bfloat16(), torch.zeros(6, 24, dtype=torch.bfloat16)
    assert torch.equal(experts_prefill.gather_rows(x, group, out)[:3], x[[0, 1, 2]])
    assert not out[3:].any()  # padding rows
    assert experts_prefill.expert_group(sorted_, 0, 2).start is None
    assert experts_prefill.expert_group(sorted_, 4, 2).last == 4


@pytest.mark.parametrize(("rows", "used", "experts_"), [(40, 8, 7), (1, 1, 3), (67, 8, 40)])
@pytest.mark.parametrize("each", [1, 4, 40])
def test_picks_are_sorted_as_torch_sorts_them(
    rows: int, used: int, experts_: int, each: int
) -> None:
    ids = torch.randint(-2, experts_, (rows, used), dtype=torch.int32)
    found, wanted = (
        experts_prefill.sort_in_groups(ids, experts_, each),
        experts_prefill.sort_picks(ids, experts_),
    )
    for a, b in (
        (found.rows, wanted.rows),
        (found.places, wanted.places),
        (found.ends, wanted.ends),
    ):
        assert torch.equal(a, b)
    ends = [0, *wanted.ends.tolist()]
    in_groups = [ends[e + 1] - ends[e // each * each] for e in range(experts_)]
    assert found.group_ends.tolist() == in_groups
