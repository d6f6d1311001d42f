"""PagePool: every page is handed out once, lowest numbers first."""

import pytest

from headroom.engine.pages import PagePool


def test_pages_are_handed_out_lowest_first_and_again_when_they_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(2)
    assert (first, second) == ([0, 1], [2, 3])
    assert (pool.free, pool.used, pool.total) == (1, 4, 5)
    pool.give_back(first)
    assert pool.take(3) == [0, 1, 4]
    pool.give_back(second)
    assert (pool.free, pool.used) == (2, 3)


def test_more_pages_than_are_free_are_never_handed_out() -> None:
    pool = PagePool(2)
    assert pool.take(0) == []
    with pytest.raises(AssertionError):
        pool.take(3)
    assert pool.take(2) == [0, 1]
    with pytest.raises(AssertionError):
        pool.take(1)


def test_a_page_that_comes_back_twice_is_noticed() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError):
        pool.give_back(pages)
