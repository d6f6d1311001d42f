"""DeviceSampler: draws the tokens of a step on a device, with the settings of many requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headroom.kernels.cuda.sampler import (
    SamplerScratch,
    Tables,
    allocate_tables,
    sample_fast,
    sample_into,
)
from headroom.kernels.cuda.sampler_tables import (
    BIASES,
    LISTS,
    NUMBERS,
    RECENT,
    SAMPLER_SETTINGS,
    TABLES,
    build_tables,
    numbers_bytes,
    token_masks,
)
from headroom.layers.step_timing import part_of_step
from headroom.machine.devices import torch_name

AnyArray = npt.NDArray[np.generic]
TokenMask = npt.NDArray[np.uint32]  # a set of tokens: token t is bit t % 32 of word t // 32
ALL_TOKENS = np.uint32(0xFFFFFFFF)  # every bit of a word


class DrawSettings(Protocol):
    """How all tokens of one request are drawn; `SAMPLER_SETTINGS` names further fields."""

    @property
    def logit_bias(self) -> Mapping[int, float]:
        """Numbers that are added to the logits of single tokens."""

    @property
    def penalty_window(self) -> int:
        """Last tokens that penalties look at; 0: all."""

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change the logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token to draw. A device compares settings and history by identity with its tables."""

    settings: DrawSettings
    history: Sequence[int]  # prompt and generated; only ever appended to
    limited: bool = False  # only some tokens may come; `draw_limited` is told which

    @property
    def fits(self) -> bool:
        """Whether a device's tables hold all that the draw looks at."""
        settings, length = self.settings, len(self.history)
        if len(settings.logit_bias) > BIASES:
            return False
        seen = min(settings.penalty_window or length, length)
        return not settings.penalises or seen <= RECENT


@dataclass(slots=True)
class _Held:
    """The draw whose numbers a row of the tables holds."""

    settings: DrawSettings | None = None  # None: the row takes the likeliest token
    history: Sequence[int] | None = None
    length: int = 0  # of the history, when the row was last filled
    biased: bool = False  # whether the row has biases


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSampler:
    """Tables, scratch and tokens at fixed addresses, so that a captured step can draw tokens."""

    tables: Tables
    scratch: SamplerScratch | None  # None unless a CUDA GPU draws
    tokens: torch.Tensor  # int64 [rows]: those of the last step
    masks: torch.Tensor  # int32 [rows, words]: tokens that limited rows may draw
    _host_masks: torch.Tensor  # in pinned memory: filled here, then copied to `masks`
    _host: Tables  # in pinned memory: filled here, then copied to `tables`
    _arrays: dict[str, AnyArray]  # the memory of `_host` as numpy sees it
    # The memory of all tables of one number per row, on the host and on the device.
    _numbers: tuple[torch.Tensor, torch.Tensor]
    _held: list[_Held]
    _copied: "torch.cuda.Event | None"  # the copies of the last filling are done

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: str) -> "DeviceSampler":
        """Return a sampler for steps of at most so many rows on a device of the plan."""
        place, masks = torch_name(device), token_masks(rows, vocabulary)
        host, numbers = _tables(rows, "cpu", pin=place != "cpu")
        tables, device_numbers = _tables(rows, place)
        cuda = device.startswith("cuda")  # AMD's GPUs draw by torch's own operations
        return cls(
            tables=tables,
            scratch=SamplerScratch.allocate(rows, vocabulary, place) if cuda else None,
            tokens=torch.zeros(rows, dtype=torch.int64, device=place),
            masks=torch.zeros(masks.shape, dtype=torch.int32, device=place),
            _host_masks=torch.zeros(masks.shape, dtype=torch.int32, pin_memory=place != "cpu"),
            _host=host,
            _arrays={name: getattr(host, name).numpy() for name in TABLES},
            _numbers=(numbers, device_numbers),
            _held=[_Held() for _ in range(rows)],
            _copied=copy_event(place),
        )

    @property
    def nbytes(self) -> int:
        """The bytes that it takes on the device."""
        lists = [getattr(self.tables, name) for name in LISTS]
        memory = self.scratch
        scratch = [] if memory is None else [getattr(memory, f.name) for f in fields(memory)]
        others = (self.tokens, self.masks, self._numbers[1])
        return sum(part.nbytes for part in (*lists, *scratch, *others))

    def fill(self, draws: Sequence[tuple[int, Draw]]) -> None:
        """Fill the rows that draw, given in ascending order; others take the likeliest token."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copies must have read this memory
        arrays, held = self._arrays, self._held
        recent = biased = at = 0
        for row, draw in draws:
            for idle in range(at, row):
                self._rest(idle)
            at = row + 1
            mine, settings, length = held[row], draw.settings, len(draw.history)
            if mine.settings is not settings or mine.history is not draw.history:
                biased |= self._take(row, draw)
            arrays["position"][row] = length
            arrays["limited"][row] = draw.limited  # may change from token to token
            if settings.penalises:
                recent = at
                self._remember(row, draw)
            mine.length = length
        for idle in range(at, len(held)):
            self._rest(idle)
        numbers, device_numbers = self._numbers
        device_numbers.copy_(numbers, non_blocking=True)
        if recent:
            self.tables.recent[:recent].copy_(self._host.recent[:recent], non_blocking=True)
        if biased:
            self.tables.bias_ids.copy_(self._host.bias_ids, non_blocking=True)
            self.tables.bias.copy_(self._host.bias, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    @part_of_step("sampling")
    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row of `logits [rows, vocabulary]`, which stay as they are.

        Rows whose draws are limited keep the token that they had.
        """
        return self._draw(logits, slice(0, len(logits)))

    @part_of_step("sampling")
    def draw_limited(
        self, logits: torch.Tensor, masks: Mapping[int, TokenMask | None]
    ) -> torch.Tensor:
        """Draw the tokens of limited rows, given their masks; None: any token may come.

        The tables hold what `fill` has written for the step of these logits. The caller has read
        the tokens of the step before, so no copy of earlier masks is under way.
        """
        rows = slice(min(masks), max(masks) + 1)
        words = self._host_masks.numpy().view(np.uint32)
        for row, mask in masks.items():
            words[row] = ALL_TOKENS if mask is None else mask
        self.masks[rows].copy_(self._host_masks[rows], non_blocking=True)
        return self._draw(logits[rows], rows, self.masks[rows])

    def _draw(
        self, logits: torch.Tensor, rows: slice, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        tables, out = _rows_of(self.tables, rows), self.tokens[rows]
        if self.scratch is None:
            return sample_into(logits, tables, out, masks)
        return sample_fast(logits, tables, self.scratch, out, masks)

    def _take(self, row: int, draw: Draw) -> bool:
        """Write the settings of a row's new request; return whether biases changed."""
        arrays, mine, settings = self._arrays, self._held[row], draw.settings
        for name in SAMPLER_SETTINGS:
            arrays[name][row] = getattr(settings, name)
        mine.settings, mine.history, mine.length = settings, draw.history, 0
        changed = bool(settings.logit_bias) or mine.biased
        if changed:
            count = len(settings.logit_bias)
            arrays["bias_ids"][row] = -1
            arrays["bias_ids"][row, :count] = list(settings.logit_bias)
            arrays["bias"][row, :count] = list(settings.logit_bias.values())
            mine.biased = count > 0
        return changed

    def _remember(self, row: int, draw: Draw) -> None:
        """Write the recent tokens, each at its position modulo the window: only counts matter."""
        window, history, mine = draw.settings.penalty_window, draw.history, self._held[row]
        size, length = min(window, RECENT) or RECENT, len(draw.history)
        places = self._arrays["recent"][row]
        if length == mine.length + 1 and mine.length:
            places[mine.length % size] = history[-1]
        elif length != mine.length:
            first = max(0, length - size)
            places[:] = -1
            places[np.arange(first, length) % size] = history[first:length]

    def _rest(self, row: int) -> None:
        """Set a row that draws nothing to take the likeliest token, which is fastest."""
        mine = self._held[row]
        if mine.settings is not None:
            mine.settings = mine.history = None
            self._arrays["temperature"][row] = self._arrays["limited"][row] = 0


def copy_event(device: str) -> "torch.cuda.Event | None":
    """Return an event for copies to or from a device; None for the CPU, where none is awaited."""
    if torch.device(device).type == "cpu":
        return None
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _tables(rows: int, device: str, *, pin: bool = False) -> tuple[Tables, torch.Tensor]:
    """Return tables, and the one piece of memory of all those of one number per row."""
    start = allocate_tables(rows, device)
    size = numbers_bytes(rows)
    memory = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin)
    views, first = {}, 0
    for name in NUMBERS:
        plain: torch.Tensor = getattr(start, name)
        views[name] = memory[first : first + plain.nbytes].view(plain.dtype).copy_(plain)
        first += plain.nbytes

    def table(name: str) -> torch.Tensor:
        if name in views:
            return views[name]
        listed: torch.Tensor = getattr(start, name)
        return listed.pin_memory() if pin else listed

    return build_tables(table), memory


def _rows_of(tables: Tables, rows: slice) -> Tables:
    """Return the tables of some rows of a step."""
    return build_tables(lambda name: getattr(tables, name)[rows])
