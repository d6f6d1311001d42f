"""Alternatives: what would fit if no settings do: another mix, more devices, more memory."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.known import smaller_mixes
from headroom.plan.plan import DoesNotFitError, make_plan
from headroom.plan.shape import ModelShape

MOST_DEVICES = 8  # of one kind in one machine
MOST_GIB = 1024  # of one device or of host memory


def alternatives(shapes: Sequence[ModelShape], options: Options) -> Iterator[str]:
    """Yield changes of the command line, nearest first; each fits without the others."""
    mixes = smaller_mixes(options.model)
    for text, shape in mixes.items():
        if _fits([shape, *shapes[1:]], options):
            yield text
            break
    for devices in _more_devices(options):
        if _fits(shapes, replace(options, device=devices)):
            yield f"--device {devices}"
            break
    for flag, change in _memory_flags(options).items():
        size = _least_gib(partial(_fits_with, shapes, change))
        if size is not None:
            yield f"{flag} {size}GiB"


def _more_devices(options: Options) -> Iterator[str]:
    """Yield several devices like the one that is too small, then that device with the CPU."""
    if not options.device or "," in options.device or options.device == "cpu":
        return
    if not re.fullmatch(r"(cuda|hip):\d+", options.device):
        for count in range(2, MOST_DEVICES + 1):
            yield ",".join([options.device] * count)
    yield f"{options.device},cpu"


def _memory_flags(options: Options) -> dict[str, Callable[[int], Options]]:
    """Return the flags that give a plan more memory; none for several devices."""
    flags: dict[str, Callable[[int], Options]] = {
        "--ram": lambda gibibytes: replace(options, ram=f"{gibibytes}GiB")
    }
    named = (options.device or "cpu").split(",")
    if len(named) == 1 and named[0] != "cpu":
        flags["--device"] = lambda gibibytes: replace(options, device=f"{gibibytes}GiB")
    return flags


def _least_gib(fits: Callable[[int], bool]) -> int | None:
    """Return the smallest whole number of GiB that fits; if some size fits, all larger ones do."""
    low, high = 1, MOST_GIB
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits_with(
    shapes: Sequence[ModelShape], change: Callable[[int], Options], gibibytes: int
) -> bool:
    return _fits(shapes, change(gibibytes))


def _fits(shapes: Sequence[ModelShape], options: Options) -> bool:
    try:
        return make_plan(shapes, plan_devices(options), options).fits
    except DoesNotFitError:
        return False
