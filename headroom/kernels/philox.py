"""Random numbers as a function of seed, position and draw: Philox 4x32-10, which keeps no state.

A request with a seed gets the same text alone, in a batch, after a preemption or when its tokens
are drafted ahead, because a draw depends on these three numbers and on nothing drawn before. The
host samples with `uniform`; kernels/cuda/sampler.py computes it on tensors, draws.cuh on a GPU.
"""

MASK = 0xFFFFFFFF  # of a 32-bit word
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after every round
ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words for a counter and a key of 32-bit words."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second & MASK,
            (first >> 32) ^ d ^ high,
            first & MASK,
        )
        low, high = (low + KEY_STEPS[0]) & MASK, (high + KEY_STEPS[1]) & MASK
    return a, b, c, d


def uniform(seed: int, position: int, draw: int) -> float:
    """Return the number in [0, 1) of a seed, a token's position and the index of the draw."""
    counter = (position & MASK, position >> 32 & MASK, draw & MASK, draw >> 32 & MASK)
    high, low, _, _ = philox(counter, (seed & MASK, seed >> 32 & MASK))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)
