"""Sizes and counts as people read and write them."""

import re

from headroom.errors import OptionError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip


def gib(size_bytes: float) -> str:
    """Return a size in the largest binary unit of which it has at least one: 1.25 GiB, 20.0 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            value = size_bytes / unit
            return f"{value:.2f} {name}" if unit == GIB else f"{value:.1f} {name}"
    return f"{size_bytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 thread`, `2 threads`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_size(text: str, setting: str | None = None) -> int:
    """Return the bytes that a size like `24GiB`, `512M` or `1.5 gb` stands for.

    `setting` is the name of the option that the size was given for. Errors name it, and the size
    must have a unit: nobody means 24 bytes by `--ram 24`.
    """
    flag = f"--{setting.replace('_', '-')} is " if setting else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(
            f"{flag}{text!r}, which is not a size." if flag else f"{text!r} is not a size.",
            hint="Write a number and a unit, as in 24GiB, 512MiB or 8GB.",
            param=setting,
        )
    number = float(match[1])
    if flag and number and not match[2]:
        raise OptionError(
            f"{flag}{text!r}, a number without a unit.",
            hint=f"Write {match[1]}GiB, {match[1]}MiB, or {match[1]}B for bytes.",
            param=setting,
        )
    return int(number * unit)
