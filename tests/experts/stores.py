"""Small stores of experts, in host memory alone or on the stand-in GPU."""

from collections.abc import Sequence
from ctypes import string_at
from dataclasses import replace
from functools import cache

import torch

from headroom.experts.exchange import Exchange, StoreExchanges
from headroom.experts.layer_store import BlobLayout, LayerStore
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.experts.store import ExpertStore, StoreRequest, open_store
from headroom.formats.quants import BY_NAME
from headroom.plan.cost_model import ColdSpeeds


def blob_layout(experts: int, sizes: tuple[int, ...] = (48, 48, 32)) -> BlobLayout:
    """Experts of a few bytes."""
    return BlobLayout(
        experts=experts,
        kinds=(BY_NAME["q8_0"],) * 3,
        width=1,
        hidden=1,
        used=1,
        sizes=sizes,
        tiles=True,
    )


def small_store(
    layouts: list[BlobLayout | None],
    hot: list[tuple[int, ...]],
    device: str = "cpu",
    **request: object,
) -> ExpertStore:
    """A store in which every expert is filled with different bytes."""
    speeds = ColdSpeeds(gpu=1e12, link=1e10, cpu=1e11, handover_s=1e-5)
    given = {
        "cold": "cpu", "speeds": speeds, "pin": False, "keep_copy": False, "staging_bytes": 1024,
    } | request  # fmt: skip
    pinned: tuple[tuple[int, ...], ...] = given.pop("pinned", ())  # type: ignore[assignment]
    placement = ExpertPlacement(tuple(hot), "drawn", pinned=pinned)
    made = StoreRequest(placement=placement, **given)  # type: ignore[arg-type]
    store = open_store(layouts, made, device, lambda line, size: None)
    for index, layer in enumerate(store.layers):
        for expert in range(layer.experts if layer else 0):
            assert layer is not None
            for blob in (layer.slot_of(expert), layer.cold_of(expert)):
                if blob is not None:
                    blob.copy_(contents(index, expert, layer.expert_bytes))
    return store


def exchange(layer: LayerStore, promoted: int, demoted: int) -> None:
    """Make a cold expert hot and a hot one cold, as if no step ran."""
    layer.begin_exchange(promoted, demoted)
    layer.finish_exchange()


class NotedExchanges(StoreExchanges):
    """Exchanges of a store; notes those that were begun and ended, and waits for copies."""

    def __init__(
        self, store: ExpertStore, layers: Sequence[LayerExperts], *, same_bits: bool = False
    ) -> None:
        super().__init__(store, layers, same_bits=same_bits)
        self.store = store
        self.begun: list[tuple[int, int, int]] = []  # layer, promoted, demoted
        self.exchanged: list[tuple[int, int, int]] = []
        self.waits = 0  # times that the host waited for a copy that had not run

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        super().begin(layer, promoted, demoted)
        self.begun.append((layer, promoted, demoted))

    def wait(self) -> None:
        self._note_wait()
        super().wait()

    def turn(self) -> None:
        self._note_wait()
        super().turn()

    def end(self) -> None:
        self._note_wait()
        super().end()
        self.exchanged.append(self.begun[-1])

    def _note_wait(self) -> None:
        self.waits += not self.ready()


def placement_after(placement: ExpertPlacement, exchanges: Sequence[Exchange]) -> ExpertPlacement:
    """Return the placement after exchanges; as many experts of each layer are hot as before."""
    hot = [set(ids) for ids in placement.hot]
    for one in exchanges:
        hot[one.layer].remove(one.demoted)
        hot[one.layer].add(one.promoted)
    return replace(placement, hot=tuple(tuple(sorted(ids)) for ids in hot))


@cache
def contents(layer: int, expert: int, size: int) -> torch.Tensor:
    """The bytes of an expert, read-only."""
    made = torch.Generator().manual_seed(1000 * layer + expert)
    return torch.randint(256, (size,), generator=made, dtype=torch.uint8)


@cache
def content_bytes(layer: int, expert: int, size: int) -> bytes:
    """The bytes of an expert, as Python has them."""
    return bytes(contents(layer, expert, size).tolist())


def check_layer(store: ExpertStore, index: int) -> None:
    """Assert that a table finds every expert of a layer once, whole and on the side it says."""
    layer = store.layers[index]
    assert layer is not None
    found = []
    for expert in range(layer.experts):
        hot = bool(layer.is_hot[expert])
        assert hot == (expert in layer.hot)
        blob = layer.slot_of(expert) if hot else layer.cold_of(expert)
        assert blob is not None
        assert torch.equal(blob.cpu(), contents(index, expert, layer.expert_bytes))
        where = [blob.data_ptr() + start for start in layer.blobs.starts]
        _check_addresses(layer, expert, where)
        found.append(where[0])
    assert len(set(found)) == layer.experts


def _check_addresses(layer: LayerStore, expert: int, where: list[int]) -> None:
    hot = bool(layer.is_hot[expert])
    assert layer.host_addresses[expert].tolist() == ([0, 0, 0] if hot else where)
    reached = hot or layer.readable
    assert layer.addresses[expert].tolist() == (where if reached else [0, 0, 0])


def check_cached_layer(store: ExpertStore, index: int) -> list[int]:
    """Assert that the GPU's table of a layer with a cache finds every expert whole.

    Return the experts that it finds in slots.
    """
    torch.cuda.synchronize()
    layer = store.layers[index]
    assert layer is not None
    addresses, place = layer.addresses.cpu().tolist(), layer.is_hot.cpu().tolist()
    for expert, number in enumerate(place):
        side, row = (layer.slots, number - 1) if number else (layer.cold, expert)
        begin = side.data_ptr() + row * layer.expert_bytes
        assert addresses[expert] == [begin + start for start in layer.blobs.starts]
        found = string_at(addresses[expert][0], layer.expert_bytes)
        assert found == content_bytes(index, expert, layer.expert_bytes)
    taken = [number for number in place if number]
    assert len(set(taken)) == len(taken)
    store.take_places()
    assert layer.hot == tuple(expert for expert, number in enumerate(place) if number)
    return list(layer.hot)
