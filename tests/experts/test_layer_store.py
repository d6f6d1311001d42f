"""A layer's store: every expert is found whole, whatever moves and whatever fails."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.experts import layer_store
from headroom.experts.copies import HostCopies, Mark
from headroom.experts.exchange import StoreExchanges
from headroom.experts.placement import LayerExperts
from tests.experts.stores import blob_layout, check_layer, exchange, small_store

Moves = list[tuple[int, int, int]]  # layer, and which of its cold and hot experts


class CopyError(RuntimeError):
    """A copy that did not happen."""


class FailingCopies(HostCopies):
    """Copies that fail at some number, counted from the first."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        self.left -= 1
        if self.left == 0:
            out.view(-1)[: out.numel() // 2] = 0  # half of it was written, even
            raise CopyError
        return super().copy(out, sources, after)

    def copy_table(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise CopyError  # of a table: one copy, all of it or nothing
        to.copy_(source)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    """Layers of some experts, of which some are hot; a layer may have none, or all hot."""
    experts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    hot = [tuple(sorted(draw(st.sets(st.sampled_from(range(n)))))) if n else () for n in experts]
    if all(len(ids) == n for n, ids in zip(experts, hot, strict=True)):
        experts, hot = [*experts, 2], [*hot, (1,)]
    return experts, hot


moves = st.lists(st.tuples(*(st.integers(0, 9),) * 3), max_size=6)


@settings(max_examples=60, deadline=None)
@given(placements(), moves, st.booleans())
def test_exchanges_lose_no_expert_and_hold_none_twice(
    placement: tuple[list[int], list[tuple[int, ...]]], moves: Moves, keep_copy: bool
) -> None:
    experts, hot = placement
    sizes = [(48, 48, 32), (64, 64, 64), (16, 32, 32), (48, 48, 32)]
    layouts = [blob_layout(n, sizes[i]) if n else None for i, n in enumerate(experts)]
    store = small_store(layouts, hot, keep_copy=keep_copy)
    mixed = [index for index, layer in enumerate(store.layers) if layer is not None]
    for index in mixed:
        check_layer(store, index)
    for choice, promoted, demoted in moves:
        index = mixed[choice % len(mixed)]
        layer = store.layers[index]
        assert layer is not None
        cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
        if not layer.hot:
            continue
        pair = cold[promoted % len(cold)], layer.hot[demoted % len(layer.hot)]
        exchange(layer, *pair)
        assert pair[0] in layer.hot
        assert pair[1] not in layer.hot
        for each in mixed:
            check_layer(store, each)
    assert store.current_placement().total == sum(map(len, hot))


class CountedCopies(HostCopies):
    """Copies that know how many bytes went from one side to the other."""

    def __init__(self, device: Sequence[torch.Tensor]) -> None:
        self.device = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in device]
        self.crossed = 0

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        for source in sources:
            if self._inside(out) != self._inside(source):
                self.crossed += source.nbytes
        return super().copy(out, sources, after)

    def _inside(self, blob: torch.Tensor) -> bool:
        return any(start <= blob.data_ptr() < end for start, end in self.device)


@pytest.mark.parametrize("keep_copy", [False, True])
def test_an_exchange_sends_as_much_over_the_link_as_exchanges_count(keep_copy: bool) -> None:
    store = small_store([blob_layout(5)], [(0, 2)], keep_copy=keep_copy)
    layer = store.layers[0]
    assert layer is not None
    copies = store.spare.copies = CountedCopies([layer.slots, store.spare.device])
    exchange(layer, 1, 2)
    told = StoreExchanges(store, [LayerExperts(5, 1)], same_bits=True).layers()[0]
    assert copies.crossed == told.exchange_bytes == (1 if keep_copy else 3) * layer.expert_bytes


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("fail_at", range(1, 7))
def test_a_copy_that_fails_leaves_every_expert_where_its_table_says(
    fail_at: int, keep_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [blob_layout(5), blob_layout(4)]
    store = small_store(layouts, [(0, 2, 4), (1,)], keep_copy=keep_copy)
    first, second = store.layers
    assert first is not None
    assert second is not None
    copies = store.spare.copies = FailingCopies(fail_at)
    table, flags = first.addresses.clone(), first.is_hot.clone()
    monkeypatch.setattr(layer_store, "copy_bytes", copies.copy_table)
    failed = False
    try:
        exchange(first, 1, 2)
    except CopyError:
        failed = True
    copies.left = 0  # nothing fails from here on
    assert failed == (fail_at <= (4 if keep_copy else 6))
    check_layer(store, 0)
    check_layer(store, 1)
    if fail_at <= (2 if keep_copy else 3):  # before any table was written
        assert torch.equal(first.addresses, table)
        assert torch.equal(first.is_hot, flags)
    # What another layer, or the same one, does next takes it up.
    exchange(second, 3, 1)
    if 1 not in first.hot:
        exchange(first, 1, 2)
    for index in range(2):
        check_layer(store, index)
    assert (first.hot, second.hot) == ((0, 1, 4), (3,))
    assert store.spare.exchange is None


def test_only_a_cold_expert_comes_and_only_a_hot_one_goes() -> None:
    layer = small_store([blob_layout(3)], [(0,)]).layers[0]
    assert layer is not None
    with pytest.raises(ValueError, match="expert 0 must be cold and 1 hot"):
        exchange(layer, 0, 1)
    with pytest.raises(ValueError, match="expert 0 must be cold and 0 hot"):
        exchange(layer, 0, 0)
    with pytest.raises(ValueError, match="expert 1 must be cold and 2 hot"):
        exchange(layer, 1, 2)
    for promoted, demoted in ((3, 0), (-1, 0), (1, 3), (1, -1)):
        with pytest.raises(IndexError, match=f"experts {promoted} and {demoted} of 3"):
            exchange(layer, promoted, demoted)
    with pytest.raises(ValueError, match="no exchange of this layer was begun"):
        layer.finish_exchange()


def test_an_exchange_that_was_only_begun_changes_nothing() -> None:
    store = small_store([blob_layout(3)], [(0,)])
    layer = store.layers[0]
    assert layer is not None
    layer.begin_exchange(1, 0)
    check_layer(store, 0)
    layer.begin_exchange(2, 0)
    layer.finish_exchange()
    check_layer(store, 0)
    assert layer.hot == (2,)
