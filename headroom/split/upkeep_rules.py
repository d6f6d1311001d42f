"""UpkeepRules: when experts are exchanged and what is saved, read from the options."""

from dataclasses import dataclass, field
from pathlib import Path

from headroom.errors import OptionError
from headroom.experts.exchange import ExchangePolicy
from headroom.formats.json_files import check_folder
from headroom.options import OFF, Options
from headroom.units import parse_size

SAVE_EVERY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepRules:
    """When experts are exchanged, and what is saved."""

    swap_every: int | None = 0  # tokens; 0: only between requests; None: never
    policy: ExchangePolicy = field(default_factory=ExchangePolicy)
    save_every_s: float = SAVE_EVERY_S
    placement_path: Path | None = None  # where the placement is saved when the engine ends


def upkeep_rules(options: Options) -> UpkeepRules:
    """Return the rules that the options ask for; refuse wrong values."""
    text = options.swap_every
    if text != OFF and not text.isdecimal():
        raise OptionError(
            f"--swap-every is {text!r}.",
            hint=f"Write a number of tokens, 0 for exchanges only between requests, or {OFF}.",
            param="swap_every",
        )
    policy = ExchangePolicy(
        min_gain=options.swap_min_gain,
        false_chance=options.swap_false_chance,
        per_layer=options.swap_per_layer,
        most_bytes=parse_size(options.swap_bytes, "swap_bytes"),
    )
    path = Path(options.save_placement).expanduser() if options.save_placement else None
    if path is not None:
        check_folder(path, "save_placement")
    return UpkeepRules(
        swap_every=None if text == OFF else int(text),
        policy=policy,
        placement_path=path,
    )
