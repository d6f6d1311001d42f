"""Terms: products whose last factor is in bytes, of which explained lines are the sums."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Factor:
    """One number of a product, and what it counts."""

    number: int
    noun: str  # in the singular

    def __str__(self) -> str:
        return f"{self.number:,} {self.noun}{'' if self.number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Term:
    """A product whose last factor is in bytes; terms add up to a line."""

    factors: tuple[Factor, ...]
    what: str = ""  # that has these bytes
    note: str = ""  # what the factors do not say

    @property
    def bytes(self) -> int:
        """The product."""
        return prod(factor.number for factor in self.factors)

    def __str__(self) -> str:
        words = [" x ".join(map(str, self.factors))]
        if len(self.factors) > 1:
            words.append(f"= {self.bytes:,} bytes")
        if self.what:
            words.append(self.what)
        if self.note:
            words.append(f"({self.note})")
        return " ".join(words)


def plain_term(size: int, what: str, note: str = "") -> Term:
    """Return a size that is no product."""
    return Term((Factor(size, "byte"),), what, note)
