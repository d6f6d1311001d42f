"""PagePool: which page numbers are free; a page has the same number on every stage."""


class PagePool:
    """Lends page numbers, lowest first, and takes them back."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many pages may still be lent."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many pages are lent."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """Lend `count` pages; the caller has made sure that they are free."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Take pages back; whoever held them must not use them again."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.total
