"""The numbers by which a layer's expert cache decides, for its kernel; without torch."""

from dataclasses import dataclass

# With fewer slots than the experts of so many tokens, a cache gives up experts before they are used
# again.
LEAST_TOKENS = 4
STEP_MOST = 1 << 30  # the number of steps after which all step numbers are halved


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """The numbers of the policies; `experts.cache` declares them."""

    score_one: int
    score_shift: int
    spare_steps: int
    spare_most: int

    @property
    def macros(self) -> dict[str, int]:
        """The macros of expert_cache.cu."""
        return {
            "SCORE_ONE": self.score_one,
            "SCORE_SHIFT": self.score_shift,
            "SPARE_STEPS": self.spare_steps,
            "SPARE_MOST": self.spare_most,
            "STEP_MOST": STEP_MOST,
        }


NO_POLICY = CacheRules(score_one=0, score_shift=0, spare_steps=0, spare_most=0)
