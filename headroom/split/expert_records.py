"""ExpertRecords: a model's routing statistics and upkeep rules, read before it is loaded."""

import time
from dataclasses import dataclass, replace

from headroom.experts.stats import StatsFile, StatsModel, open_stats, stats_model
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.json_files import check_replaceable
from headroom.options import Options
from headroom.plan.shape import ModelShape
from headroom.split.unused import tell_unmeasured
from headroom.split.upkeep_rules import UpkeepRules, upkeep_rules


@dataclass(frozen=True, slots=True)
class ExpertRecords:
    """A model's routing statistics, and the rules of its experts' upkeep."""

    model: StatsModel
    file: StatsFile
    rules: UpkeepRules


def read_records(
    checkpoint: Checkpoint, shape: ModelShape, options: Options, *, measuring: bool = False
) -> ExpertRecords:
    """Read the files and rules that the options name, or refuse them.

    With `measuring` nothing is saved and no expert is exchanged, so that speeds can be compared.
    """
    rules = upkeep_rules(options)
    if rules.placement_path is not None:
        check_replaceable(rules.placement_path, "placement", "save_placement", checkpoint.files)
    counted = stats_model(checkpoint.path, checkpoint.identity, shape, checkpoint.files)
    file = open_stats(options.routing_stats, counted, options.home_path, time.time())
    if measuring:
        tell_unmeasured(options)
        rules, file = UpkeepRules(swap_every=None), replace(file, path=None)
    return ExpertRecords(counted, file, rules)
