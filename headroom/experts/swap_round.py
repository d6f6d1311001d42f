"""SwapRound: planned swaps, one after another, whose copies run while steps run."""

from collections import deque
from collections.abc import Callable, Sequence

from headroom.experts.swap import Swap, Swappable


class SwapRound:
    """Each swap takes three calls: it is begun, it turns, it ends and the next one is begun.

    Between them copies run, and steps. A failure ends the round: swaps before it stay done, and
    the one that failed leaves every expert where its layer finds it.
    """

    def __init__(self, experts: Swappable, swaps: Sequence[Swap]) -> None:
        self._experts = experts
        self._left = deque(swaps)
        self._now: Swap | None = None
        self.turned = False  # the swap under way has changed sides
        self.done: list[Swap] = []
        self.error: Exception | None = None  # that ended the round
        self._next()

    @property
    def over(self) -> bool:
        """Whether nothing is under way any more."""
        return self._now is None

    def ready(self) -> bool:
        """Tell whether the next call has no copies to wait for; it tells of those that failed."""
        try:
            return self._experts.ready()
        except Exception:
            return True

    def turn(self) -> Swap | None:
        """Let two experts change sides, and return the swap unless it failed; no step may run."""
        assert not self.turned
        swap = self._now
        self.turned = self._try(self._experts.turn)
        return swap if self.turned else None

    def end(self) -> None:
        """Bring a swap that has turned to its end, and begin the next one; steps may run."""
        assert self.turned
        swap = self._now
        if self._try(self._experts.end):
            assert swap is not None
            self.done.append(swap)
            self._next()

    def give_way(self) -> None:
        """Forget all swaps but one that has turned: its experts are not at their places yet."""
        self._left.clear()
        if not self.turned:
            self._now = None

    def stop(self) -> None:
        """Give way, and wait until no copy runs."""
        if self._now is None:
            return
        self._try(self._experts.wait)
        self.give_way()
        if self._now is not None:
            self.end()

    def _next(self) -> None:
        self.turned, self._now = False, None
        if self._left:
            swap = self._now = self._left.popleft()
            self._try(lambda: self._experts.begin(swap.layer, swap.promoted, swap.demoted))

    def _try(self, act: Callable[[], None]) -> bool:
        """Tell whether it went well; if not, the round is over."""
        try:
            act()
        except Exception as error:
            self.error, self._now = error, None
            return False
        return True
