"""Gated DeltaNet: the same bits however a sequence is divided into steps; its closed form."""

from dataclasses import replace

import pytest
import torch

from headroom.kernels.ops import Case, DeltaNetWeights, Kernel, RecurrentState, Span
from headroom.kernels.registry import KERNELS

NO_PAGES = torch.empty(0, dtype=torch.int64)
KERNELS_HERE = [k for k in KERNELS if k.op == "delta_net" and k.refuses(Case()) is None]
KEY_HEADS, HEADS, DIM, TAPS, ROWS = 2, 6, 48, 4, 40
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


def weights() -> DeltaNetWeights:
    decay, bias = -torch.rand(HEADS) - 0.1, torch.randn(HEADS)
    return DeltaNetWeights(torch.randn(CHANNELS, TAPS), decay, bias, KEY_HEADS, tiled=True)


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, CHANNELS), torch.randn(ROWS, HEADS), torch.randn(ROWS, HEADS)


def unclean_state(slots: int) -> RecurrentState:
    """Return states that earlier sequences have used."""
    inputs = torch.full((slots, TAPS - 1, CHANNELS), 7.0)
    return RecurrentState(torch.full((slots, HEADS, DIM, DIM), 5.0), inputs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=str)
@pytest.mark.parametrize("sizes", [[1] * ROWS, [3, 30, 1, 6], [2, 1, 1, 36]])
def test_steps_of_any_size_beside_any_neighbour_give_the_same_bits(
    kernel: Kernel, sizes: list[int]
) -> None:
    torch.manual_seed(1)
    given, others, small = rows(), rows(), weights()
    whole = unclean_state(1)
    expected = kernel.run(*given, small, whole, (Span(0, ROWS, 0, NO_PAGES),))
    parts, state, start = [], unclean_state(3), 0
    for size in sizes:
        # Another sequence's rows come first; ours has the last slot.
        batch = [
            torch.cat((b[:2], a[start : start + size])) for a, b in zip(given, others, strict=True)
        ]
        spans = (
            Span(0, 2, 0, NO_PAGES, state_slot=1),
            Span(2, size, start, NO_PAGES, state_slot=2),
        )
        parts.append(kernel.run(*batch, small, state, spans)[2:])
        start += size
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(state.memory[2], whole.memory[0])
    assert torch.equal(state.inputs[2], whole.inputs[0])
    assert bool((state.memory[0] == 5).all()), "a slot that nobody used has changed"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=str)
def test_the_recurrence_equals_its_closed_form(kernel: Kernel) -> None:
    torch.manual_seed(2)
    qkv, beta, alpha = rows()
    small = replace(weights(), key_heads=HEADS, conv=torch.ones(3 * HEADS * DIM, 1))
    qkv = torch.randn(ROWS, 3 * HEADS * DIM)
    before = torch.randn(1, HEADS, DIM, DIM)
    state = RecurrentState(before.clone(), torch.empty(1, 0, 3 * HEADS * DIM))
    out = kernel.run(qkv, beta, alpha, small, state, (Span(0, ROWS, 9, NO_PAGES),))
    expected, after = closed_form(qkv, beta, alpha, small, before[0])
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(state.memory[0].double(), after, atol=2e-5, rtol=0)


def closed_form(
    qkv: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor,
    small: DeltaNetWeights,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows at once by one triangular system, in float64: outputs and the state after them."""
    mixed = torch.nn.functional.silu(qkv.double()).view(ROWS, 3, HEADS, DIM).permute(1, 2, 0, 3)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in mixed[:2])
    q, v = q * DIM**-0.5, mixed[2]
    b = beta.double().sigmoid().T[:, :, None]  # [heads, rows, 1]
    g = small.decay.double() * torch.nn.functional.softplus(alpha.double() + small.dt_bias)
    total = g.T.cumsum(1)  # [heads, rows]
    gap = (total[:, :, None] - total[:, None, :]).tril()
    decay = gap.exp().tril()
    system = torch.eye(ROWS).double() + (b * (k @ k.mT) * decay).tril(-1)
    fade = total.exp()[:, :, None]
    u = torch.linalg.solve(system, b * (v - fade * (k @ before.double())))
    out = fade * (q @ before.double()) + ((q @ k.mT) * decay) @ u
    last = (total[:, -1:] - total).exp()[:, :, None]
    after = fade[:, -1:] * before.double() + (last * k).mT @ u
    return out.transpose(0, 1), after


def random_tree(nodes: int, generator: torch.Generator) -> list[int]:
    """Return the row that each row of a tree follows; -1: the text before the tree."""
    first = [-1]
    while len(first) < nodes:
        first.append(int(torch.randint(-1, len(first), (1,), generator=generator)))
    return first


def seen_rows(parents: list[int]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=str)
@pytest.mark.parametrize("nodes", [2, 3, 8, 22, 31])
@pytest.mark.parametrize("start", [0, 9])
def test_every_path_of_guesses_has_the_bits_of_its_rows_as_text_and_the_state_stays(
    kernel: Kernel, nodes: int, start: int
) -> None:
    generator = torch.Generator().manual_seed(nodes)
    torch.manual_seed(nodes)
    small, others = weights(), rows()
    given = [x[:nodes] for x in rows()]
    before = RecurrentState(torch.randn(2, HEADS, DIM, DIM), torch.randn(2, TAPS - 1, CHANNELS))
    for parents in (random_tree(nodes, generator), list(range(-1, nodes - 1))):
        mask = seen_rows(parents)
        tree = None if parents == list(range(-1, nodes - 1)) else mask
        state = RecurrentState(before.memory.clone(), before.inputs.clone())
        spans = (
            Span(0, 3, 0, NO_PAGES, state_slot=1),  # a neighbour with plain rows
            Span(3, nodes, start, NO_PAGES, state_slot=0, tree=tree, guessed=True),
        )
        batch = [torch.cat((b[:3], a)) for a, b in zip(given, others, strict=True)]
        found = kernel.run(*batch, small, state, spans)[3:]
        assert torch.equal(state.memory[0], before.memory[0])
        assert torch.equal(state.inputs[0], before.inputs[0])
        assert not torch.equal(state.memory[1], before.memory[1])
        for row in range(nodes):
            path = mask[row].nonzero().flatten()
            alone = RecurrentState(before.memory.clone(), before.inputs.clone())
            text = (Span(0, len(path), start, NO_PAGES),)
            wanted = kernel.run(*[x[path] for x in given], small, alone, text)
            assert torch.equal(found[row], wanted[-1])


def test_guesses_equal_the_masked_triangular_form() -> None:
    torch.manual_seed(4)
    nodes, parents = 31, random_tree(31, torch.Generator().manual_seed(9))
    small = replace(weights(), key_heads=HEADS, conv=torch.ones(3 * HEADS * DIM, 1))
    qkv, (_, beta, alpha) = torch.randn(nodes, 3 * HEADS * DIM), rows()
    beta, alpha, mask = beta[:nodes], alpha[:nodes], seen_rows(parents)
    before = torch.randn(1, HEADS, DIM, DIM)
    state = RecurrentState(before.clone(), torch.empty(1, 0, 3 * HEADS * DIM))
    span = Span(0, nodes, 9, NO_PAGES, tree=mask, guessed=True)
    wanted = masked_triangular_form(qkv, beta, alpha, small, before[0], mask)
    for kernel in KERNELS_HERE:
        out = kernel.run(qkv, beta, alpha, small, state, (span,))
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


def masked_triangular_form(
    qkv: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor,
    small: DeltaNetWeights,
    before: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The outputs of all nodes of a tree by one unit triangular system, in float64."""
    nodes = len(mask)
    mixed = torch.nn.functional.silu(qkv.double()).view(nodes, 3, HEADS, DIM).permute(1, 2, 0, 3)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in mixed[:2])
    q, v = q * DIM**-0.5, mixed[2]
    b = beta.double().sigmoid().T[:, :, None]  # [heads, nodes, 1]
    g = small.decay.double() * torch.nn.functional.softplus(alpha.double() + small.dt_bias)
    along = g.T @ mask.double().T  # [heads, nodes]: the sum of each path
    decay = torch.where(mask, (along[:, :, None] - along[:, None, :]).exp(), 0.0)
    system = torch.eye(nodes).double() + (b * (k @ k.mT) * decay).tril(-1)
    fade = along.exp()[:, :, None]
    u = torch.linalg.solve(system, b * (v - fade * (k @ before.double())))
    return (fade * (q @ before.double()) + ((q @ k.mT) * decay) @ u).transpose(0, 1)
