"""Layers whose slots change hands, on any device, beside the model of their cache."""

from dataclasses import dataclass

import torch

from headroom.experts.cache import POLICIES, RULES, CacheModel, Policy
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import (
    COUNTERS,
    FILL_WORDS,
    STEP_FILLED,
    CpuRequest,
    Filling,
    LayerTable,
)
from headroom.kernels.cuda.handover import Mailbox
from headroom.kernels.ops import Picks

SIZES = (32, 16, 48)  # bytes of gate, up and down
EXPERT_BYTES = sum(SIZES)
HIDDEN = 8


@dataclass(frozen=True, slots=True, eq=False)
class CachedLayer:
    """A layer as the GPU has it, and the model of its cache."""

    table: LayerTable
    filling: Filling
    model: CacheModel
    box: Mailbox

    def resolve(self, ids: torch.Tensor, asks: bool, origin: int = STEP_FILLED) -> Picks:
        """Resolve a step's picks, which lie in host memory; `asks`: the CPU takes some."""
        where = self.table.place.device
        picks = Picks(ids.clone().to(where), torch.rand(ids.shape, device=where))
        x = torch.ones(len(ids), HIDDEN, device=where)
        request = CpuRequest(x, self.box, 0) if asks else None
        return expert_cache.resolve(picks, self.table, RULES, request, origin)

    def experts_at(self) -> list[int]:
        """Return the expert to whose bytes the table leads, by expert."""
        whole = torch.cat([self.filling.host, self.filling.slots.cpu()])
        found = []
        for address in self.table.addresses[:, 0].tolist():
            at = address - self.filling.host.data_ptr()
            if not 0 <= at < self.filling.host.numel():
                at = address - self.filling.slots.data_ptr() + self.filling.host.numel()
            found.append(int(whole.flatten()[at]))
        return found


def layer_of(
    policy: Policy,
    experts: int,
    resident: list[int],
    pinned: list[int],
    link: list[int] | None,
    device: str = "cpu",
) -> CachedLayer:
    """Return a layer whose experts' bytes are all their own number."""
    numbers = torch.arange(experts, dtype=torch.uint8)[:, None]
    host = numbers.repeat(1, EXPERT_BYTES).contiguous()
    if device != "cpu":
        host = host.pin_memory()
    slots = host[resident].clone().to(device)
    place, addresses = torch.zeros(experts, dtype=torch.int32), torch.empty(experts, 3).long()
    place[resident] = torch.arange(1, len(resident) + 1).int()
    starts = torch.tensor([0, SIZES[0], SIZES[0] + SIZES[1]])
    for expert in range(experts):
        slot = int(place[expert]) - 1
        at = host[expert] if slot < 0 else slots[slot]
        addresses[expert] = at.data_ptr() + starts
    state = expert_cache.new_state(experts, POLICIES.index(policy), pinned)
    words = torch.zeros(FILL_WORDS, dtype=torch.int32, device=device)
    filling = Filling(words, host, slots, sum(SIZES[:2]))
    table = LayerTable(
        place=place.to(device),
        addresses=addresses.to(device),
        counts=torch.zeros(len(COUNTERS), dtype=torch.int64, device=device),
        link=None if link is None else torch.tensor(link, dtype=torch.int32, device=device),
        state=state.to(device),
        filling=filling,
        starts=(SIZES[0], SIZES[0] + SIZES[1]),
        seen=torch.full((1024,), -7, dtype=torch.int32, device=device),
    )
    model = CacheModel.start(policy, experts, resident, pinned)
    return CachedLayer(table, filling, model, Mailbox.allocate(HIDDEN, 1, device))


def random_ids(rows: int, experts: int, used: int) -> torch.Tensor:
    """Return distinct experts for each row, small numbers more often; some rows are padding."""
    weights = 1.0 / torch.arange(1, experts + 1)
    ids = torch.stack([torch.multinomial(weights, used) for _ in range(rows)]).int()
    ids[torch.rand(rows) < 0.1] = -1
    return ids
