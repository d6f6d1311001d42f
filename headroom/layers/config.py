"""What each block needs to know, as plain data: the planner reads it without torch."""

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]  # weights by name, rows first


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dims` values of a head."""

    theta: float
    dims: int
    divisors: tuple[float, ...] = ()  # of the dims / 2 frequencies; empty: all one


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # of scores, before softmax
    window: int = 0  # last tokens that a token sees; 0: all
    interleaved: bool = False  # q and k rows come in rotary pairs (2i, 2i + 1), not in halves

    def shapes(self, hidden: int) -> Shapes:
        """Return the weights of this block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn.norm": (hidden,),
            "attn.q": (queries, hidden),
            "attn.k": (keys, hidden),
            "attn.v": (keys, hidden),
            "attn.out": (hidden, queries),
        }


@dataclass(frozen=True, slots=True)
class FfnConfig:
    """A gated feed-forward network: `down(silu(gate x) * up x)`."""

    width: int

    def shapes(self, hidden: int) -> Shapes:
        """Return the weights of this block."""
        return {
            "ffn.norm": (hidden,),
            "ffn.gate": (self.width, hidden),
            "ffn.up": (self.width, hidden),
            "ffn.down": (hidden, self.width),
        }
