"""Philox against its published vectors, and numbers that depend on seed, position and draw."""

from hypothesis import given
from hypothesis import strategies as st

from headroom.kernels.philox import philox, uniform


def test_philox_gives_the_published_vectors() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**33))
def test_uniform_is_in_range_and_depends_on_all_three(seed: int, position: int, draw: int) -> None:
    value = uniform(seed, position, draw)
    assert 0 <= value < 1
    others = {uniform(seed ^ 1, position, draw), uniform(seed, position + 1, draw)}
    others |= {uniform(seed, position, draw + 1)}
    assert value not in others
