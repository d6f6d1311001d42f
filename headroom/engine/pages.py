"""PagePool: the free pages of the KV cache; a page has the same number on every stage."""


class PagePool:
    """Hands out page numbers, lowest first, and takes them back."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """The number of pages in use."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` free pages; the caller has checked that there are enough."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Take pages back, which their holder must not use any more."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.total
