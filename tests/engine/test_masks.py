"""Masks of several answers, computed side by side."""

import threading

import numpy as np

from headroom.engine.masks import MaskPool
from headroom.layers.draws import TokenMask


class Fixed:
    """A constraint that allows one token, or raises, or waits for another constraint."""

    def __init__(self, token: int | None, together: threading.Barrier | None = None) -> None:
        self._token, self._together = token, together

    def may_limit(self, unread: int) -> bool:
        return True

    def mask(self) -> TokenMask | None:
        if self._together is not None:
            self._together.wait(timeout=30)
        if self._token is None:
            raise ValueError("no token")
        return np.array([1 << self._token], dtype=np.uint32)

    def advance(self, token: int) -> None:
        raise AssertionError("masks do not advance")


class Free(Fixed):
    def mask(self) -> TokenMask | None:
        return None


def test_each_constraint_gets_its_own_mask_or_error() -> None:
    pool = MaskPool()
    found = pool.compute([Fixed(3), Free(1), Fixed(None), Fixed(5)])
    pool.close()
    assert found[1] is None
    assert isinstance(found[2], ValueError)
    assert [list(found[at]) for at in (0, 3)] == [[8], [32]]  # type: ignore[arg-type]


def test_masks_of_several_answers_are_computed_at_the_same_time() -> None:
    together = threading.Barrier(2)  # each waits for the other
    pool = MaskPool()
    assert len(pool.compute([Fixed(1, together), Fixed(2, together)])) == 2
    pool.close()


def test_one_mask_needs_no_thread() -> None:
    pool, before = MaskPool(), set(threading.enumerate())
    assert pool.compute([]) == []
    assert len(pool.compute([Fixed(1)])) == 1
    assert set(threading.enumerate()) <= before  # threads of other tests may have ended
    pool.close()


def test_masks_come_in_the_order_of_their_constraints() -> None:
    pool = MaskPool()
    for count in (2, 7, 8, 9, 31):
        found = pool.compute([Fixed(token) for token in range(count)])
        assert [int(mask[0]) for mask in found] == [1 << token for token in range(count)]  # type: ignore[index,union-attr]
    pool.close()
