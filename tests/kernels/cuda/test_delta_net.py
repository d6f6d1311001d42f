"""Gated DeltaNet on a GPU: its tables of spans, and its norm in 16 bits, run on the CPU."""

import pytest
import torch

from headroom.kernels.cuda import delta_net
from headroom.kernels.cuda.delta_net import CHUNK, span_tables
from headroom.kernels.ops import Span
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)


CPU = torch.device("cpu")
NO_PAGES = torch.zeros(0, dtype=torch.int64)


def test_rows_of_no_span_are_padding_and_chunks_begin_with_their_span() -> None:
    spans = (Span(0, CHUNK + 1, 0, NO_PAGES, 3), Span(CHUNK + 1, 2, 10, NO_PAGES, 1))
    tables = span_tables(spans, CHUNK + 5, CPU)
    assert tables.sequence.tolist() == [0] * (CHUNK + 1) + [1, 1, -1, -1]
    assert tables.index.tolist() == [*range(CHUNK + 1), 10, 11, 0, 0]
    assert tables.starts.tolist() == [0, 10]
    assert tables.state_slots.tolist() == [3, 1]
    assert tables.first_rows.tolist() == [0, CHUNK, CHUNK + 1]
    assert tables.counts.tolist() == [CHUNK, 1, 2]
    assert tables.chunk_ends.tolist() == [2, 3]


def test_normed_heads_in_bf16_are_those_in_float32_rounded() -> None:
    x, gate, weight = torch.randn(3, 5, 128), torch.randn(3, 5, 128), torch.randn(128)
    narrow_ = torch.zeros(3, 640).bfloat16()
    assert delta_net.gated_norm(x, gate, weight, 1e-6, narrow_) is narrow_
    wide = delta_net.gated_norm(x, gate, weight, 1e-6)
    assert torch.equal(narrow_, wide.flatten(1).bfloat16())
