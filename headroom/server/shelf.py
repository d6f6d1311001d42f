"""Shelf: the models of a server by name; it loads them on demand and unloads idle ones."""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from headroom.engine.engine import Engine
from headroom.errors import DeviceError, HeadroomError, PlanError, is_out_of_memory
from headroom.llm import LLM
from headroom.options import Options
from headroom.server.model_card import (
    ModelCard,
    available_bytes,
    loaded_card,
    planned_bytes,
    read_card,
)
from headroom.server.refusals import RefusalError
from headroom.split.choice import make_run_plan
from headroom.units import gib

log = logging.getLogger("headroom.server")

LATEST = ":latest"  # the tag that clients of Ollama add to names
NEVER = math.inf  # as idle seconds: the model stays loaded
Progress = Callable[[int, int], None]  # called with bytes done and bytes in all


@dataclass(slots=True, eq=False)
class Place:
    """The place of one model on the shelf, loaded or not; the shelf alone changes it."""

    card: ModelCard
    options: Options  # of this model
    idle_s: float  # seconds without a request after which the model is unloaded
    llm: LLM | None = None
    taken: Mapping[str, int] | None = None  # bytes by device, if loaded
    leases: int = 0  # requests that use the model
    leaving: bool = False  # it is unloaded as soon as no request uses it
    last_used: float = 0.0  # time.monotonic()
    load_s: float = 0.0  # seconds that the last load took
    loads: int = 0
    loading: "asyncio.Task[None] | None" = None
    timer: asyncio.TimerHandle | None = None
    unused: asyncio.Event | None = None  # set when the last lease of a leaving model ends

    @property
    def name(self) -> str:
        """The name that clients choose the model by."""
        return self.card.name

    @property
    def context(self) -> int | None:
        """The tokens that one conversation may hold; None if the model does not fit."""
        return self.llm.context if self.llm is not None else self.card.context

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts; before it is loaded, a guess by its chat template."""
        if self.llm is not None:
            return self.llm.reasoning is not None
        return "think" in (self.card.chat_template or "")

    @property
    def removable(self) -> bool:
        """Whether the model can be loaded again after it was unloaded."""
        return self.card.path is not None

    @property
    def idle_left_s(self) -> float:
        """Seconds until the model is unloaded, if nobody asks for it."""
        if self.leases or not self.removable:
            return self.idle_s if self.removable else NEVER
        return max(0.0, self.last_used + self.idle_s - time.monotonic())


class Lease:
    """Keeps a model loaded until `release` is called."""

    def __init__(self, shelf: "Shelf", place: Place, llm: LLM) -> None:
        self.llm = llm
        self.place = place
        self._shelf: Shelf | None = shelf

    def release(self) -> None:
        """Let the model be unloaded; further calls do nothing."""
        if self._shelf is not None:
            self._shelf._release(self.place)
            self._shelf = None


class Shelf:
    """All models that a server can answer with; the first one answers if none is named.

    Everything but `load_first` and `close` runs in the server's event loop. Models are loaded and
    unloaded in threads, one at a time, in the order in which they were asked for.
    """

    def __init__(
        self, cards: Sequence[ModelCard], options: Options, open_llm: Callable[..., LLM] = LLM
    ) -> None:
        assert cards
        idle_s = options.idle_unload if options.idle_unload else NEVER
        self.places = [
            Place(card, _options_of(card, options, single=len(cards) == 1), idle_s)
            for card in cards
        ]
        self._open_llm = open_llm
        self._turn = asyncio.Lock()  # held by the task that loads or unloads
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # Bytes that were available of each device when nothing was loaded.
        self._available: dict[str, int] = {}
        for card in cards:
            self._note_available(card)

    @classmethod
    def of_files(
        cls, models: Mapping[str, Path], options: Options, open_llm: Callable[..., LLM] = LLM
    ) -> "Shelf":
        """Return the shelf of some models on disk; none is loaded yet.

        Several models are planned, each without the others. An only one is planned by its load.
        """
        planned = len(models) > 1
        cards = [read_card(name, path, options, planned=planned) for name, path in models.items()]
        for card in cards:
            if card.error is not None and card is not cards[0]:  # the first one's error is raised
                log.warning("shelf: %s cannot be loaded: %s", card.name, card.error)
            elif card.plan is not None:
                needed = " + ".join(f"{gib(n)} of {d}" for d, n in _planned(card).items())
                log.info("shelf: %s, context %d, needs %s", card.name, card.context, needed)
        return cls(cards, options, open_llm)

    @classmethod
    def of_loaded(cls, llm: LLM, options: Options) -> "Shelf":
        """Return the shelf of one model that the caller has loaded and will close."""
        shelf = cls([loaded_card(llm)], options)
        shelf.places[0].llm = llm
        return shelf

    @property
    def several(self) -> bool:
        """Whether there is more than one model."""
        return len(self.places) > 1

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [place.name for place in self.places]

    def engines(self) -> dict[str, Engine]:
        """Return the engines of the loaded models, by the models' names."""
        loaded = [(place.name, place.llm) for place in list(self.places)]
        return {name: llm.engine for name, llm in loaded if llm is not None}

    def find(self, name: str) -> Place | None:
        """Return the place of a model; case and the tag `:latest` do not matter."""
        wanted = name.strip().lower()
        for text in (wanted, wanted.removesuffix(LATEST)):
            for place in self.places:
                if place.name.lower() == text:
                    return place
        return None

    def load_first(self, progress: Progress = lambda done, total: None) -> None:
        """Load the first model, before the server starts; its errors are the caller's."""
        place = self.places[0]
        if place.card.error is not None:
            raise place.card.error
        self._open(place, {}, progress)

    async def hold(self, place: Place) -> Lease:
        """Load the model if it is not loaded, and keep it loaded until the lease is released."""
        while place.llm is None or place.leaving:
            if place.card.error is not None:
                raise not_loaded(place, place.card.error)
            if place.loading is None:
                place.loading = self._start(self._load(place))
            # Other requests wait for this load, too: it goes on if one of them is cancelled.
            await asyncio.shield(place.loading)
        return self._lease(place, place.llm)

    def hold_again(self, llm: LLM) -> Lease | None:
        """Return one more lease of a loaded model; None if it is not of this shelf."""
        for place in self.places:
            if place.llm is llm:
                return self._lease(place, llm)
        return None

    def keep(self, place: Place, idle_s: float) -> None:
        """Set after how many seconds without a request a model is unloaded."""
        place.idle_s = idle_s
        if not place.leases:
            self._set_timer(place)

    async def unload(self, place: Place) -> None:
        """Unload a model as soon as no request uses it; one that the caller loaded stays."""
        if not place.removable:
            return
        async with self._turn:
            if place.llm is not None:
                await self._unload(place)

    def close(self) -> None:
        """Close all models that the shelf has loaded; the event loop has ended."""
        self._stopping = True
        for place in self.places:
            if place.removable and place.llm is not None:
                place.llm.close()
                place.llm = None

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stop(self) -> None:
        """Load no more models: the server is about to end."""
        self._stopping = True

    def start_timers(self) -> None:
        """Begin to count the idle seconds of models that were loaded before the server started."""
        for place in self.places:
            self._set_timer(place)

    # Leases

    def _lease(self, place: Place, llm: LLM) -> Lease:
        place.leases += 1
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        return Lease(self, place, llm)

    def _release(self, place: Place) -> None:
        place.leases -= 1
        place.last_used = time.monotonic()
        if place.leases:
            return
        if place.unused is not None:
            place.unused.set()
        self._set_timer(place)

    def _set_timer(self, place: Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        if place.llm is None or place.leaving or not place.removable or self._stopping:
            return
        if place.idle_s < NEVER:
            loop = asyncio.get_running_loop()
            place.timer = loop.call_later(place.idle_left_s, self._expire, place)

    def _expire(self, place: Place) -> None:
        place.timer = None
        self._start(self._unload_idle(place))

    def _start(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken, so that it is not reported again if all waiters have left

    # Loading and unloading

    async def _load(self, place: Place) -> None:
        try:
            async with self._turn:
                if self._stopping:
                    raise _stopping()
                if place.llm is not None:
                    return
                left = await self._make_room(place)
                await asyncio.to_thread(self._open, place, left, lambda done, total: None)
            self._set_timer(place)
        except Exception as error:
            log.error("shelf: %s was not loaded: %s", place.name, error)
            raise not_loaded(place, error) from error
        finally:
            place.loading = None

    async def _make_room(self, place: Place) -> dict[str, int]:
        """Unload other models until this one fits; return the bytes that are left by device."""
        shape = place.card.shape
        assert shape is not None
        fixed = place.card.fixed(place.options)
        while True:
            left = self._left()
            try:
                await asyncio.to_thread(make_run_plan, shape, fixed, left)
                return left
            except (PlanError, DeviceError):
                others = [x for x in self.places if x.llm is not None and x.removable]
                if not others:
                    raise
            # Models that nobody uses go first, and of these the one that waited longest.
            victim = min(others, key=lambda other: (other.leases > 0, other.last_used))
            log.info("shelf: %s makes room for %s", victim.name, place.name)
            await self._unload(victim)

    def _left(self) -> dict[str, int]:
        """Return the bytes that loaded models leave of each device, by their plans."""
        left = dict(self._available)
        for place in self.places:
            for device, size in (place.taken or {}).items():
                if device in left:
                    left[device] -= size
        return left

    def _note_available(self, card: ModelCard) -> None:
        if card.plan is not None:
            self._available = {**available_bytes(card.plan), **self._available}

    def _open(self, place: Place, left: Mapping[str, int], progress: Progress) -> None:
        """Load a model; this runs in a thread."""

        def show(done: int, total: int) -> None:
            if self._stopping:
                raise _stopping()
            progress(done, total)

        started = time.perf_counter()
        alone = not left
        options = place.options if alone else place.card.fixed(place.options)
        path = place.card.path
        llm = self._open_llm(options=options, path=path, progress=show, memory_left=left)
        if self._stopping:
            llm.close()
            raise _stopping()
        place.load_s = time.perf_counter() - started
        place.loads += 1
        place.taken = planned_bytes(llm.plan)
        if place.card.plan is None:
            place.card = replace(place.card, plan=llm.plan)
            self._note_available(place.card)
        place.last_used = time.monotonic()
        place.llm = llm
        log.info("shelf: %s loaded in %.1f s", place.name, place.load_s)

    async def _unload_idle(self, place: Place) -> None:
        async with self._turn:
            waited = time.monotonic() - place.last_used >= place.idle_s
            if place.llm is not None and not place.leases and waited:
                log.info("shelf: %s was idle for %.0f s", place.name, place.idle_s)
                await self._unload(place)

    async def _unload(self, place: Place) -> None:
        """Unload a model as soon as no request uses it; requests that come now wait."""
        place.leaving = True
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        try:
            while place.leases:
                place.unused = asyncio.Event()
                await place.unused.wait()
            llm, place.llm = place.llm, None
            assert llm is not None
            await asyncio.to_thread(llm.close)
            del llm
            await asyncio.to_thread(_free_memory, last=not self.engines())
            place.taken = None
            log.info("shelf: %s unloaded", place.name)
        finally:
            place.unused = None
            place.leaving = False


def not_loaded(place: Place, error: Exception) -> RefusalError:
    """Return the refusal of a request whose model cannot be loaded."""
    if isinstance(error, RefusalError):
        return error
    full = isinstance(error, PlanError | DeviceError) or is_out_of_memory(error)
    told = error.message if isinstance(error, HeadroomError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, HeadroomError) else ""
    return RefusalError(
        503 if full else 500,
        "model_not_loaded",
        f"The model {place.name!r} cannot be loaded: {told}",
        hint=hint,
        param="model",
    )


def _stopping() -> RefusalError:
    return RefusalError(503, "shutting_down", "The server is shutting down.")


def _free_memory(*, last: bool) -> None:
    """Give the memory of dropped tensors back to the devices; `last`: no model is loaded now.

    cuBLAS keeps 32 MiB for each stream that has used it, which captured steps of other models may
    refer to. Only when there are none can that be freed, too.
    """
    gc.collect()
    if last and torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()  # does nothing unless a GPU is in use


def _options_of(card: ModelCard, options: Options, *, single: bool) -> Options:
    """Return the options of one of the models."""
    if single:
        return options
    return replace(options, model=str(card.path or card.name), served_name=card.name)


def _planned(card: ModelCard) -> dict[str, int]:
    return {} if card.plan is None else planned_bytes(card.plan)
