"""How much of a rendering's budget a call takes."""

import itertools
from collections.abc import Callable
from copy import copy
from typing import Any

from jinja2.exceptions import SecurityError

from headroom.text.template_limits import (
    MAX_CHARACTERS,
    MAX_MADE,
    MAX_STEPS,
    RenderBudget,
    budget,
    new_budget,
)


def taken(bound: Callable[..., object], *arguments: Any, **named: Any) -> int:
    """Return the characters that a call takes from a full budget, by what is left of it."""
    with new_budget():
        bound(*arguments, **named)
        low, high = 0, MAX_MADE
        while low < high:  # the largest amount that can still be made
            middle = (low + high + 1) // 2
            if fits(middle, budget()):
                low = middle
            else:
                high = middle - 1
    return MAX_MADE - low


def fits(characters: int, of: RenderBudget) -> bool:
    """Return whether a budget has so many characters left, and leave it as it was."""
    tried = copy(of)
    try:
        while characters > 0:
            tried.make(min(characters, MAX_CHARACTERS))
            characters -= MAX_CHARACTERS
    except SecurityError:
        return False
    return True


def steps_of(run: Callable[[], object]) -> int:
    """Return the steps that a call takes from a full budget, by what is left of it."""
    with new_budget():
        run()
        return next(spent for spent in itertools.count() if has_steps(MAX_STEPS - spent))


def has_steps(steps: int) -> bool:
    """Return whether this rendering has so many steps left, and leave its budget as it was."""
    try:
        copy(budget()).step(steps)
    except SecurityError:
        return False
    return True
