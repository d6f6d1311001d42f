"""Row orders and rotary tables, against transformers; whole layers are tested by families."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headroom.families.config import AttentionConfig, OutputGate, RopeConfig
from headroom.layers.attention import pair_rows, query_rows, rope_tables
from headroom.layers.batch import Batch

NO_TOKENS = torch.empty(0, dtype=torch.int64)


def config(
    heads: int, dim: int, *, gate: OutputGate = "none", pairs: bool = False
) -> AttentionConfig:
    rope = RopeConfig(1e4, dim)
    return AttentionConfig(heads, heads, dim, rope, scale=1.0, gate=gate, interleaved=pairs)


def batch_at(positions: torch.Tensor) -> Batch:
    return Batch(NO_TOKENS, positions, NO_TOKENS, (), NO_TOKENS)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head of `x [rows, heads, dim]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@settings(deadline=None)
@given(st.sampled_from([16, 64, 128]), st.floats(100.0, 1e7), st.integers(0, 100_000))
def test_tables_rotate_heads_as_transformers_does(dim: int, theta: float, position: int) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": theta}
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, rope_parameters=rope)
    )
    positions = torch.tensor([position, 0, 1])
    queries = torch.randn(1, 2, 3, dim)  # [batch, heads, rows, dim]
    wanted, _ = apply_rotary_pos_emb(queries, queries, *oracle(queries, positions[None]))
    cos, sin = rope_tables(RopeConfig(theta, dim), batch_at(positions))
    found = rotate(queries[0].transpose(0, 1), cos, sin)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_divisors_slow_frequencies_down_and_a_scale_multiplies() -> None:
    positions = torch.tensor([3, 12])
    plain = rope_tables(RopeConfig(1e4, 8), batch_at(positions))
    slow = rope_tables(RopeConfig(1e4, 8, (4.0,) * 4, scale=0.5), batch_at(4 * positions))
    for mine, its in zip(slow, plain, strict=True):
        torch.testing.assert_close(mine, 0.5 * its)


def test_layers_with_one_rotation_share_its_tables() -> None:
    batch = batch_at(torch.tensor([3, 12]))
    first = rope_tables(RopeConfig(1e4, 8), batch)
    assert rope_tables(RopeConfig(1e4, 8), batch) is first
    assert rope_tables(RopeConfig(1e5, 8), batch) is not first


@pytest.mark.parametrize("heads", [1, 3])
def test_reordered_rows_turn_rotated_pairs_into_rotated_halves(heads: int) -> None:
    """The pairs are rows 2i and 2i + 1 of the file."""
    torch.manual_seed(0)
    dim, hidden, positions = 8, 16, torch.tensor([0, 5, 77])
    weight, x = torch.randn(heads * dim, hidden), torch.randn(3, hidden)
    cos, sin = rope_tables(RopeConfig(1e4, dim), batch_at(positions))
    whole = torch.view_as_complex((x @ weight.T).view(3, heads, dim // 2, 2))
    turned = torch.view_as_real(whole * torch.complex(cos, sin)[:, None])  # [rows, heads, pairs, 2]
    order = pair_rows(config(heads, dim, pairs=True), heads)
    assert order is not None
    found = rotate((x @ weight[order].T).view(3, heads, dim), cos, sin)
    torch.testing.assert_close(found, turned.transpose(2, 3).flatten(2))
    assert pair_rows(config(heads, dim), heads) is None


def test_queries_come_before_gates() -> None:
    heads, dim = 3, 4
    order = query_rows(config(heads, dim, gate="query"))
    assert order is not None
    # A file has each head's query rows, then its gate rows.
    rows = torch.arange(2 * heads * dim).view(heads, 2, dim)
    assert torch.equal(order[: heads * dim], rows[:, 0].flatten())
    assert torch.equal(order[heads * dim :], rows[:, 1].flatten())


def test_without_gates_among_the_queries_only_pairs_are_reordered() -> None:
    plain, pairs = config(3, 4, gate="head"), config(3, 4, gate="head", pairs=True)
    assert query_rows(plain) is None
    order, wanted = query_rows(pairs), pair_rows(pairs, 3)
    assert order is not None
    assert wanted is not None
    assert torch.equal(order, wanted)
