"""Shelf: the models of a server; loads a model for its first request, and unloads idle ones."""

import asyncio
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from headroom.engine.engine import Engine
from headroom.errors import DeviceError, HeadroomError, PlanError, is_out_of_memory
from headroom.llm import LLM
from headroom.options import Options
from headroom.progress import LoadProgress, LoadStep, ignore_progress
from headroom.server.model_card import (
    HOST,
    ModelCard,
    available_bytes,
    loaded_card,
    planned_bytes,
    planned_card,
    read_card,
)
from headroom.server.refusals import RefusalError, shutting_down
from headroom.split.choice import make_run_plan
from headroom.units import gib

log = logging.getLogger("headroom.server")

LATEST = ":latest"  # the tag that clients of Ollama add to names
NEVER = math.inf  # as idle seconds: the model stays loaded


@dataclass(slots=True)
class FirstLoad:
    """The progress of loading the first model, which begins when the server starts."""

    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """The part that is loaded, from 0 to 1."""
        return self.done / self.total if self.total else 0.0


@dataclass(slots=True, eq=False)
class ShelvedModel:
    """One model of the shelf, loaded or not; only the shelf changes it."""

    card: ModelCard
    options: Options  # of this model
    idle_s: float  # seconds without a request after which the model is unloaded
    llm: LLM | None = None  # None: not loaded
    taken: Mapping[str, int] | None = None  # planned bytes by device; None: not loaded
    leases: int = 0  # number of requests that use the model
    leaving: bool = False  # it will be unloaded as soon as no request uses it
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
        """The context of one sequence, in tokens; None if the model has no plan."""
        return self.llm.context if self.llm is not None else self.card.context

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts; until it is loaded, guessed from its chat template."""
        if self.llm is not None:
            return self.llm.reasoning is not None
        return "think" in (self.card.chat_template or "")

    @property
    def removable(self) -> bool:
        """Whether the model can be loaded again after it was unloaded."""
        return self.card.path is not None

    @property
    def idle_for_s(self) -> float:
        """Seconds since the last request ended, or since the load; 0 while a request runs."""
        return 0.0 if self.leases else time.monotonic() - self.last_used

    @property
    def idle_left_s(self) -> float:
        """Seconds until the model is unloaded, if no request comes."""
        if self.leases or not self.removable:
            return self.idle_s if self.removable else NEVER
        return max(0.0, self.last_used + self.idle_s - time.monotonic())


class Lease:
    """Keeps a model loaded until `release` is called."""

    def __init__(self, shelf: "Shelf", shelved: ShelvedModel, llm: LLM) -> None:
        self.llm = llm
        self.shelved = shelved
        self._shelf: Shelf | None = shelf

    def release(self) -> None:
        """Let the model be unloaded; further calls do nothing."""
        if self._shelf is not None:
            self._shelf._release(self.shelved)
            self._shelf = None


class Shelf:
    """All models of a server; the first one answers requests that name none.

    All methods but `load_first` and `close` run in the server's event loop. Models are loaded and
    unloaded in threads, one at a time, in the order of the requests.
    """

    def __init__(
        self, cards: Sequence[ModelCard], options: Options, open_llm: Callable[..., LLM] = LLM
    ) -> None:
        assert cards
        idle_s = options.idle_unload if options.idle_unload else NEVER
        self.models = [
            ShelvedModel(card, _options_of(card, options, single=len(cards) == 1), idle_s)
            for card in cards
        ]
        self._open_llm = open_llm
        self._turn = asyncio.Lock()  # held by the task that loads or unloads a model
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.first_load: FirstLoad | None = None  # None: not announced, or done
        self._available: dict[str, int] = {}  # bytes by device when no model was loaded
        for card in cards:
            self._note_available(card)

    @classmethod
    def of_files(
        cls, models: Mapping[str, Path], options: Options, open_llm: Callable[..., LLM] = LLM
    ) -> "Shelf":
        """Return the shelf of some models on disk; none is loaded yet.

        Several models are planned now, each as if it were alone. A single one is planned when it
        is loaded, and so is each whose layers workers run: their devices are known only then.
        """
        planned = len(models) > 1 and options.workers is None
        cards = [read_card(name, path, options, planned=planned) for name, path in models.items()]
        for card in cards:
            wrong = card.error or card.unfit
            if wrong is not None and card is not cards[0]:  # the first one's error is raised
                log.warning("shelf: %s cannot be loaded: %s", card.name, wrong)
            elif card.plan is not None:
                needed = " + ".join(f"{gib(n)} of {d}" for d, n in _planned(card).items())
                log.info("shelf: %s, context %d, needs %s", card.name, card.context, needed)
        return cls(cards, options, open_llm)

    @classmethod
    def of_loaded(cls, llm: LLM, options: Options) -> "Shelf":
        """Return the shelf of one model that the caller has loaded and will close."""
        shelf = cls([loaded_card(llm)], options)
        shelf.models[0].llm = llm
        shelf.models[0].last_used = time.monotonic()
        return shelf

    def add_aliases(self, aliases: Mapping[str, Path | None]) -> None:
        """Let clients choose the shelf's models by aliases, too; `aliases` maps them to files."""
        for shelved in self.models:
            path = shelved.card.path
            own = {name.lower() for name, at in aliases.items() if path and at == path.absolute()}
            shelved.card = replace(shelved.card, aliases=frozenset(own))

    @property
    def several(self) -> bool:
        """Whether there is more than one model."""
        return len(self.models) > 1

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [shelved.name for shelved in self.models]

    def engines(self) -> dict[str, Engine]:
        """Return the engines of the loaded models, by model name."""
        loaded = [(shelved.name, shelved.llm) for shelved in list(self.models)]
        return {name: llm.engine for name, llm in loaded if llm is not None}

    def find(self, name: str) -> ShelvedModel | None:
        """Return the model of that name or alias.

        Case, the tag `:latest` and the end `.gguf` do not matter.
        """
        wanted = name.strip().lower()
        untagged = wanted.removesuffix(LATEST)
        for text in (wanted, untagged, untagged.removesuffix(".gguf")):
            for shelved in self.models:
                if shelved.name.lower() == text or text in shelved.card.aliases:
                    return shelved
        return None

    def announce_first_load(self) -> FirstLoad:
        """Refuse requests until `load_first` has loaded the first model."""
        self.first_load = self.first_load or FirstLoad()
        return self.first_load

    def load_first(self, progress: LoadProgress = ignore_progress) -> None:
        """Load the first model, before the server accepts requests; its errors are raised."""
        shelved = self.models[0]
        if (wrong := shelved.card.error or shelved.card.unfit) is not None:
            raise wrong
        load = self.announce_first_load()

        def show(done: int, total: int, step: LoadStep = "loading") -> None:
            if step == "loading":
                load.done, load.total = done, total
            progress(done, total, step)

        self._open(shelved, {}, show)
        self.first_load = None

    async def hold(self, shelved: ShelvedModel) -> Lease:
        """Load the model if it is not loaded, and keep it loaded until the lease is released."""
        while shelved.llm is None or shelved.leaving:
            if shelved.card.error is not None:
                raise not_loaded(shelved, shelved.card.error)
            if shelved.loading is None:
                shelved.loading = self._start(self._load(shelved))
            # Several requests may wait for this load: cancelling one must not cancel the load.
            await asyncio.shield(shelved.loading)
        return self._lease(shelved, shelved.llm)

    def hold_again(self, llm: LLM) -> Lease | None:
        """Return another lease of a loaded model; None if the model is not on this shelf."""
        for shelved in self.models:
            if shelved.llm is llm:
                return self._lease(shelved, llm)
        return None

    def keep(self, shelved: ShelvedModel, idle_s: float) -> None:
        """Set after how many seconds without a request a model is unloaded."""
        shelved.idle_s = idle_s
        if not shelved.leases:
            self._set_timer(shelved)

    async def unload(self, shelved: ShelvedModel) -> None:
        """Unload a model as soon as no request uses it; a model without a file stays loaded."""
        if not shelved.removable:
            return
        async with self._turn:
            if shelved.llm is not None:
                await self._unload(shelved)

    def close(self) -> None:
        """Close all models that the shelf has loaded, after the event loop has ended."""
        self._stopping = True
        for shelved in self.models:
            if shelved.removable and shelved.llm is not None:
                shelved.llm.close()
                shelved.llm = None

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
        """Load no more models, because the server stops."""
        self._stopping = True

    def start_timers(self) -> None:
        """Start the idle timers of models that were loaded before the event loop ran."""
        for shelved in self.models:
            self._set_timer(shelved)

    # Leases

    def _lease(self, shelved: ShelvedModel, llm: LLM) -> Lease:
        shelved.leases += 1
        if shelved.timer is not None:
            shelved.timer.cancel()
            shelved.timer = None
        return Lease(self, shelved, llm)

    def _release(self, shelved: ShelvedModel) -> None:
        shelved.leases -= 1
        shelved.last_used = time.monotonic()
        if shelved.leases:
            return
        if shelved.unused is not None:
            shelved.unused.set()
        self._set_timer(shelved)

    def _set_timer(self, shelved: ShelvedModel) -> None:
        if shelved.timer is not None:
            shelved.timer.cancel()
            shelved.timer = None
        if shelved.llm is None or shelved.leaving or not shelved.removable or self._stopping:
            return
        if shelved.idle_s < NEVER:
            loop = asyncio.get_running_loop()
            shelved.timer = loop.call_later(shelved.idle_left_s, self._expire, shelved)

    def _expire(self, shelved: ShelvedModel) -> None:
        shelved.timer = None
        self._start(self._unload_idle(shelved))

    def _start(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read it, or asyncio reports it if no request waits any more

    # Loading and unloading

    async def _load(self, shelved: ShelvedModel) -> None:
        try:
            async with self._turn:
                if self._stopping:
                    raise shutting_down()
                if shelved.llm is not None:
                    return
                left = await self._make_room(shelved)
                await asyncio.to_thread(self._open, shelved, left, ignore_progress)
            self._set_timer(shelved)
        except Exception as error:
            log.error("shelf: %s was not loaded: %s", shelved.name, error)
            raise not_loaded(shelved, error) from error
        finally:
            shelved.loading = None

    async def _make_room(self, shelved: ShelvedModel) -> dict[str, int]:
        """Unload other models until this one fits; return the free bytes by device.

        For a model that workers run, all others are unloaded. If another model would not fit even
        alone, nothing is unloaded and PlanError is raised.
        """
        if shelved.options.workers is not None:
            # The workers of two models would share one address and the same cores.
            for other in self.models:
                if other.llm is not None and other.removable:
                    await self._unload(other)
            return self._left() if shelved.card.plan is not None else {}
        if shelved.card.plan is None:
            await self._plan_again(shelved)
        shape = shelved.card.shape
        assert shape is not None
        fixed = shelved.card.fixed(shelved.options)
        possible = False  # it is known that the model fits without the others
        while True:
            left = self._left()
            try:
                await asyncio.to_thread(make_run_plan, shape, fixed, left)
                return left
            except (PlanError, DeviceError):
                others = [
                    other for other in self.models if other.llm is not None and other.removable
                ]
                if not others:
                    raise
            if not possible:
                held = self._held()
                await asyncio.to_thread(make_run_plan, shape, fixed, self._available, held)
                possible = True
            # Models without requests go first, least recently used first.
            leaving = min(others, key=lambda other: (other.leases > 0, other.last_used))
            log.info("shelf: %s makes room for %s", leaving.name, shelved.name)
            await self._unload(leaving)

    async def _plan_again(self, shelved: ShelvedModel) -> None:
        """Plan a model that did not fit before; raise its error if it still does not fit."""
        # The system counts mapped files of loaded models as available host memory, so host memory
        # that these models hold must not be added once more.
        held = {device: size for device, size in self._held().items() if device != HOST}
        card, options = shelved.card, shelved.options
        shelved.card = card = await asyncio.to_thread(planned_card, card, options, held)
        if card.unfit is not None:
            raise card.unfit
        assert card.plan is not None
        log.info("shelf: %s fits now", card.name)
        for device, size in available_bytes(card.plan).items():
            self._available[device] = max(size, self._available.get(device, 0))

    def _held(self) -> dict[str, int]:
        """Return by device the bytes that unloading all models would free, as planned."""
        held: Counter[str] = Counter()
        for shelved in self.models:
            if shelved.removable:
                held.update(shelved.taken or {})
        return dict(held)

    def _left(self) -> dict[str, int]:
        """Return by device the bytes that the loaded models leave free, as planned."""
        left = dict(self._available)
        for shelved in self.models:
            for device, size in (shelved.taken or {}).items():
                if device in left:
                    left[device] -= size
        return left

    def _note_available(self, card: ModelCard) -> None:
        if card.plan is not None:
            self._available = {**available_bytes(card.plan), **self._available}

    def _open(self, shelved: ShelvedModel, left: Mapping[str, int], progress: LoadProgress) -> None:
        """Load a model, in the calling thread."""

        def show(done: int, total: int, step: LoadStep = "loading") -> None:
            if self._stopping:
                raise shutting_down()
            progress(done, total, step)

        started = time.perf_counter()
        alone = not left
        options = shelved.options if alone else shelved.card.fixed(shelved.options)
        path = shelved.card.path
        llm = self._open_llm(options=options, path=path, progress=show, memory_left=left)
        if self._stopping:
            llm.close()
            raise shutting_down()
        shelved.load_s = time.perf_counter() - started
        shelved.loads += 1
        shelved.taken = planned_bytes(llm.plan)
        if shelved.card.plan is None:
            shelved.card = replace(shelved.card, plan=llm.plan)
            self._note_available(shelved.card)
        shelved.last_used = time.monotonic()
        shelved.llm = llm
        log.info("shelf: %s loaded in %.1f s", shelved.name, shelved.load_s)

    async def _unload_idle(self, shelved: ShelvedModel) -> None:
        async with self._turn:
            waited = time.monotonic() - shelved.last_used >= shelved.idle_s
            if shelved.llm is not None and not shelved.leases and waited:
                log.info("shelf: %s was idle for %.0f s", shelved.name, shelved.idle_s)
                await self._unload(shelved)

    async def _unload(self, shelved: ShelvedModel) -> None:
        """Wait until no request uses a model, and unload it; new requests for it wait."""
        shelved.leaving = True
        if shelved.timer is not None:
            shelved.timer.cancel()
            shelved.timer = None
        try:
            while shelved.leases:
                shelved.unused = asyncio.Event()
                await shelved.unused.wait()
            llm, shelved.llm = shelved.llm, None
            assert llm is not None
            await asyncio.to_thread(llm.close)
            del llm
            await asyncio.to_thread(_free_memory, last=not self.engines())
            shelved.taken = None
            log.info("shelf: %s unloaded", shelved.name)
        finally:
            shelved.unused = None
            shelved.leaving = False


def not_loaded(shelved: ShelvedModel, error: Exception) -> RefusalError:
    """Return the error of a request whose model cannot be loaded."""
    if isinstance(error, RefusalError):
        return error
    full = isinstance(error, PlanError | DeviceError) or is_out_of_memory(error)
    told = error.message if isinstance(error, HeadroomError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, HeadroomError) else ""
    return RefusalError(
        503 if full else 500,
        "model_not_loaded",
        f"The model {shelved.name!r} cannot be loaded: {told}",
        hint=hint,
        param="model",
    )


def _free_memory(*, last: bool) -> None:
    """Give the memory of dropped tensors back to the devices; `last`: no model is loaded now.

    cuBLAS keeps 32 MiB for each stream that has used it. Captured steps of loaded models may refer
    to it, so it is freed only when no model is loaded.
    """
    gc.collect()
    if last and torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()  # does nothing unless a GPU is in use


def _options_of(card: ModelCard, options: Options, *, single: bool) -> Options:
    """Return the options of one model of the server."""
    if single:
        return options
    return replace(options, model=str(card.path or card.name), served_name=card.name)


def _planned(card: ModelCard) -> dict[str, int]:
    return {} if card.plan is None else planned_bytes(card.plan)
