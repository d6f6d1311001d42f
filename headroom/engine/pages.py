"""PagePool: who uses each page of the KV cache; a page has the same number on every stage."""

from collections.abc import Callable, Sequence


class PagePool:
    """Hands out page numbers, lowest first, and takes them back.

    Several sequences may use the same page. The prefix cache keeps pages whose tokens it knows.
    Such a page is *idle* while no sequence uses it, and the cache gives it up when the free pages
    have run out.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.idle = 0
        self.evict: Callable[[int], None] = lambda wanted: None  # makes idle pages free
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages  # sequences that use each page
        self._keeps = [0] * pages  # how often the prefix cache keeps each page

    @property
    def free(self) -> int:
        """The number of pages that can be taken, idle ones included."""
        return len(self._free) + self.idle

    @property
    def used(self) -> int:
        """The number of pages that sequences use."""
        return self.total - self.free

    def take(self, count: int) -> list[int]:
        """Return `count` free pages; the caller has checked that there are enough."""
        if count > len(self._free):
            self.evict(count - len(self._free))
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Let one more sequence use pages that the prefix cache keeps."""
        for page in pages:
            self.idle -= self._is_idle(page)
            self._users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Take pages back, which their user must not use any more."""
        for page in reversed(pages):
            assert self._users[page] > 0
            self._users[page] -= 1
            self._let_go(page)

    def keep(self, page: int) -> None:
        """Let the prefix cache keep a page that a sequence uses."""
        assert self._users[page] or self._keeps[page]
        self._keeps[page] += 1

    def drop(self, page: int) -> None:
        """Let the prefix cache keep a page no longer."""
        assert self._keeps[page] > 0
        self.idle -= self._is_idle(page)
        self._keeps[page] -= 1
        self._let_go(page)

    def is_used(self, page: int) -> bool:
        """Return whether a sequence uses a page."""
        return self._users[page] > 0

    def _is_idle(self, page: int) -> bool:
        return not self._users[page] and self._keeps[page] > 0

    def _let_go(self, page: int) -> None:
        """Count a page that has lost a user or a keep as idle or free, if nobody uses it."""
        if self._users[page]:
            return
        if self._keeps[page]:
            self.idle += 1
        else:
            self._free.append(page)
