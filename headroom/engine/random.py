"""Random numbers that are a function of their place: Philox 4x32-10, no state to keep.

The same seed gives the same text alone, in a batch, resumed or guessed ahead, because a draw
depends on the seed, the position and the draw's index and on nothing that happened before.
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words for a counter and a key of 32-bit words."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second & _MASK,
            (first >> 32) ^ d ^ high,
            first & _MASK,
        )
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int, draw: int) -> float:
    """Return the number in [0, 1) that belongs to a seed, a position and a draw's index."""
    counter = (position & _MASK, position >> 32 & _MASK, draw & _MASK, draw >> 32 & _MASK)
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)
