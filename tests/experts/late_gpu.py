"""A GPU that computes and copies only when a test lets it, in two queues beside each other."""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from headroom.experts.store import ExpertStore
from tests.experts.stores import contents

Work = Iterator[None]  # in two parts or more: others may come between them


class CopyError(RuntimeError):
    """A copy that did not happen."""


@dataclass(eq=False)
class LateMark:
    """A point in one of the queues."""

    is_reached: Callable[[], bool]
    go_on: Callable[[], None]

    def query(self) -> bool:
        return self.is_reached()

    def synchronize(self) -> None:
        while not self.is_reached():
            self.go_on()


@dataclass(eq=False)
class LateCopy:
    """One copy: its place is rubbish from its begin to its end."""

    out: torch.Tensor
    sources: Sequence[torch.Tensor]
    after: LateMark
    ended: bool = False

    def run(self, fails: Callable[[], bool]) -> Work:
        self.out.fill_(0xFF)
        yield
        if not fails():
            self.out.copy_(torch.cat([source.flatten() for source in self.sources]))
        self.ended = True


@dataclass(eq=False)
class LateGpu:
    """Fills CopyQueue; `launch` is for steps, `copy_table` for copies among them.

    Copies are counted as they are asked for: one may be refused then, or fail when it runs. What
    comes after one that failed does not run either, and whoever asks hears of it.
    """

    refused_at: int = 0  # counted from 1; tables count, too
    failed_at: int = 0
    asked: int = 0
    broken: bool = False
    wrong: list[str] = field(default_factory=list)  # that steps have seen
    _steps: deque[Work] = field(default_factory=deque)
    _launched: int = 0
    _copies: deque[tuple[LateCopy, Work]] = field(default_factory=deque)

    def mark(self) -> LateMark:
        here = self._launched
        return LateMark(lambda: self._launched - len(self._steps) >= here, self.compute)

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: LateMark) -> LateMark:
        self._ask()
        number, made = self.asked, LateCopy(out, list(sources), after)

        def fails() -> bool:
            self.broken |= number == self.failed_at
            return self.broken

        def is_reached() -> bool:
            if made.ended and self.broken:
                raise CopyError
            return made.ended

        self._copies.append((made, made.run(fails)))
        return LateMark(is_reached, self.go_on)

    def wait(self, mark: LateMark) -> None:
        raise AssertionError("steps do not wait for exchanges")

    def copy_table(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the order of steps; the source is read when it runs, as pinned memory is."""
        self._ask()
        self._launch(self._table(to, source))

    def launch(self, store: ExpertStore) -> None:
        """Launch a step that reads all experts."""
        self._launch(self._step(store))

    def compute(self) -> None:
        """Do a part of the step that is next; nothing if there is none."""
        if self._steps and _did_all(self._steps[0]):
            self._steps.popleft()

    def copy_on(self) -> None:
        """Do a part of the copy that is next, if it may begin."""
        if self._copies:
            made, work = self._copies[0]
            if made.after.query() and _did_all(work):
                self._copies.popleft()

    def go_on(self) -> None:
        """Do a part of what is next in either queue."""
        self.copy_on()
        self.compute()

    def land(self) -> None:
        """Wait for all steps."""
        while self._steps:
            self.compute()

    def rest(self) -> None:
        """Wait for everything."""
        while self._steps or self._copies:
            self.go_on()

    def repair(self) -> None:
        """Let nothing fail from here on."""
        self.refused_at, self.failed_at, self.broken = 0, 0, False

    def _ask(self) -> None:
        self.asked += 1
        if self.asked == self.refused_at:
            raise CopyError

    def _launch(self, work: Work) -> None:
        self._launched += 1
        self._steps.append(work)

    def _table(self, to: torch.Tensor, source: torch.Tensor) -> Work:
        to.copy_(source)  # one copy, all of it or nothing
        yield

    def _step(self, store: ExpertStore) -> Work:
        """Read the tables, and after a while what they point to, as kernels and a CPU do."""
        seen = [
            None if layer is None else (layer.addresses.clone(), layer.is_hot.tolist())
            for layer in store.layers
        ]
        yield
        for index, (layer, found) in enumerate(zip(store.layers, seen, strict=True)):
            if layer is None or found is None:
                continue
            by_gpu, is_hot = found
            for expert in range(layer.experts):
                places = {"gpu": int(by_gpu[expert, 0])}
                if not is_hot[expert]:
                    places["cpu"] = int(layer.host_addresses[expert, 0])
                wanted = bytes(contents(index, expert, layer.expert_bytes).tolist())
                for who, place in places.items():
                    if not place or ctypes.string_at(place, layer.expert_bytes) != wanted:
                        self.wrong.append(f"{who}: expert {expert} of layer {index}")


def _did_all(work: Work) -> bool:
    return next(work, "end") == "end"
