"""The device's side of a layer's expert cache: a step resolves its picks and fills slots.

`resolve` is launched between the router and the experts of a decode step. It follows the rules of
`experts.cache.CacheModel` and changes the layer's table in GPU memory, so that a captured step
needs no host. The kernels of the experts then copy the fills (`ExpertTiles.filling`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.kernels.cuda import route_scratch, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.expert_rules import NO_POLICY, CacheRules
from headroom.kernels.cuda.handover import MOST_ROWS, MOST_USED, WORDS, Mailbox
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.ops import Picks

MOST_FILLS = MOST_ROWS * MOST_USED  # of a layer in one step
FILL_WORDS = 4 + 4 * MOST_FILLS  # see fill.cuh
FILL_THREADS = 256  # of a block that copies fills
FILL_BLOCKS = 96  # that copy fills of a layer: enough 16-byte loads in flight to fill a link
STATE_WORDS = 4  # of a layer's cache before the words of its experts
EXPERT_WORDS = 4  # of each expert in a layer's cache
PINNED = -1  # the uses of an expert that never gives up its slot
# Counters of a layer since the start, as in experts.cache.CacheCounts; the picks of padding rows
# are not counted.
COUNTERS = (
    *("steps", "picks", "hits", "linked", "filled", "bypassed", "left_to_cpu"),
    *("pinned_hits", "prefetched_hits"),
)
# Why an expert got its slot within a step: a step asked for it, or a prompt's end fills it ahead.
STEP_FILLED, FILLED_AHEAD = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """The memories between which experts of a layer are filled, and the list of a step's fills."""

    words: torch.Tensor  # int32 [FILL_WORDS] on the GPU; layers use it one after another
    host: torch.Tensor  # uint8 [experts, bytes]: every expert, readable by the GPU
    slots: torch.Tensor  # uint8 [slots, bytes] on the GPU
    front_bytes: int  # of an expert's gate and up, which come first

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of kernels that copy fills."""
        count, expert_bytes = self.slots.shape
        return self.words, self.host, self.slots, count, expert_bytes, self.front_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """What `resolve` reads and changes of one layer; all tensors are on the GPU."""

    place: torch.Tensor  # int32 [experts]: 0 in host memory, n > 0 in slot n - 1; static: any n
    addresses: torch.Tensor  # int64 [experts, 3]
    counts: torch.Tensor  # int64 [COUNTERS]
    link: torch.Tensor | None = None  # int32: of n misses, how many cross the link; None: all
    state: torch.Tensor | None = None  # int32, see `new_state`; None: experts never change places
    filling: Filling | None = None  # as `state`
    starts: tuple[int, int] = (0, 0)  # where up and down begin within an expert, if it is filled
    seen: torch.Tensor | None = None  # int32 [picks]: receives the picks of a step

    @property
    def memories(self) -> tuple[Argument, ...]:
        """The arguments that say where experts lie."""
        if self.filling is None:
            return None, None, 0, 0, 0
        host, slots = self.filling.host, self.filling.slots
        return host, slots, slots.shape[1], *self.starts


@dataclass(frozen=True, slots=True, eq=False)
class CpuRequest:
    """Where `resolve` asks the CPU for the misses that do not cross the link."""

    x: torch.Tensor  # float32 [rows, hidden]
    box: Mailbox
    layer: int  # in the mailbox


def static_table(is_hot: torch.Tensor, link: torch.Tensor | None) -> LayerTable:
    """Return the table of a layer whose experts stay where they are; `is_hot` int32 [experts]."""
    device = is_hot.device
    addresses = torch.zeros(len(is_hot), 3, dtype=torch.int64, device=device)
    counts = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
    return LayerTable(place=is_hot, addresses=addresses, counts=counts, link=link)


def new_state(experts: int, policy: int, pinned: Sequence[int] = ()) -> torch.Tensor:
    """Return the words of a cache in host memory, before its first step.

    Experts that are `pinned`, and in slots, never leave.
    """
    state = torch.zeros(state_words(experts), dtype=torch.int32)
    state[0] = policy
    state[[STATE_WORDS + experts + expert for expert in pinned]] = PINNED
    return state


def origins_of(state: torch.Tensor) -> torch.Tensor:
    """Return the words of a cache that say why experts are in slots; 0: the host put them there."""
    experts = (len(state) - STATE_WORDS) // EXPERT_WORDS
    return state[STATE_WORDS + 3 * experts :]


def state_words(experts: int) -> int:
    """Return the int32 words of a layer's cache."""
    return STATE_WORDS + EXPERT_WORDS * experts


def resolve(
    picks: Picks | RouterLogits,
    table: LayerTable,
    rules: CacheRules,
    cpu: CpuRequest | None,
    origin: int = STEP_FILLED,  # of the experts that are filled
) -> Picks:
    """Resolve the picks of a decode step; return them with -1 for those that the CPU computes.

    Given logits, the kernel does the top-k, too. Ids that are given change in place.
    """
    macros, fused = rules.macros | WORDS, isinstance(picks, RouterLogits)
    if isinstance(picks, RouterLogits):
        rule = picks.rule
        rows, used = len(picks.logits), rule.used
        buffers = route_scratch.picks(rows, used)
        ids, weights = (scratch.take(buffer, picks.logits.device) for buffer in buffers)
        macros |= picks.constants
        args: tuple[Argument, ...] = (
            *(picks.logits, picks.logits.stride(0), picks.bias, picks.sequence, picks.counts),
            *(int(rule.normalise), float(rule.scale), float(rule.softcap)),
            *(ids, weights, rows, used, table.place, table.state),
        )
    else:
        ids, weights = picks
        rows, used = ids.shape
        assert ids.is_contiguous()
        assert weights.is_contiguous()
        args = ids, weights, rows, used, table.place, table.state, len(table.place)
    assert rows <= MOST_ROWS
    assert used <= MOST_USED
    most = 0 if table.link is None else len(table.link) - 1
    slots = 0 if table.filling is None else len(table.filling.slots)
    words = None if table.filling is None else table.filling.words
    args = (
        *(*args, slots, table.addresses, *table.memories, table.link, most, words),
        *(table.seen, table.counts, *_request(cpu), origin),
    )
    threads = _threads(rows)
    macros |= {"THREADS": threads}
    if fused:
        kernel = compile_kernel("expert_cache.cu", "choose_resolve", macros)
    else:
        kernel = compile_kernel("expert_cache.cu", "resolve", macros)
    kernel((1,), (threads,), args, early=True)
    return Picks(ids, weights)


def fill(filling: Filling) -> None:
    """Copy the fills that `resolve` has listed, where no kernel of the experts follows it."""
    macros = NO_POLICY.macros | WORDS | {"THREADS": FILL_THREADS}
    compile_kernel("expert_cache.cu", "fill", macros)(
        (FILL_BLOCKS,), (FILL_THREADS,), filling.arguments, early=True
    )


@dataclass(frozen=True, slots=True, eq=False)
class ShadowTables:
    """Caches of integers alone, by layer and policy; all tensors are on the GPU."""

    seen: torch.Tensor  # int32 [layers, picks]: the picks of a step
    shape: torch.Tensor  # int32 [layers, 3]: experts, slots (0: left out), picks of a row
    places: torch.Tensor  # int32 [layers, policies, experts]
    states: torch.Tensor  # int32 [layers, policies, words]
    counts: torch.Tensor  # int64 [layers, policies, COUNTERS]


def shadow(tables: ShadowTables, rows: int, rules: CacheRules) -> None:
    """Resolve the picks that `resolve` has left in `seen`, in all layers and for all policies."""
    layers, policies, experts = tables.places.shape
    threads = _threads(rows)
    kernel = compile_kernel(
        "expert_cache.cu", "shadow", rules.macros | WORDS | {"THREADS": threads}
    )
    kernel(
        (layers, policies),
        (threads,),
        (
            *(tables.seen, tables.seen.shape[1], tables.shape, tables.places, experts),
            *(tables.states, tables.states.shape[2], tables.counts, rows),
        ),
        early=True,
    )


def _threads(rows: int) -> int:
    """Return the threads of a block: a warp for each row, in as few variants as are useful."""
    return 256 if rows <= 8 else 32 * MOST_ROWS


def _request(cpu: CpuRequest | None) -> tuple[Argument, ...]:
    if cpu is None:
        return None, None, None, None, 0, 0
    box = cpu.box
    return cpu.x, box.words, box.own, box.counts[cpu.layer], box.hidden, cpu.layer
