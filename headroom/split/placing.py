"""find_placement(): which experts of a planned model are hot, checked against the plan."""

import logging
from pathlib import Path

from headroom.errors import PlanError
from headroom.experts.placement import (
    ExpertCounts,
    ExpertPlacement,
    LayerExperts,
    check_floor,
    even_experts,
    load_placement,
    place_experts,
)
from headroom.options import Options
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.unused import tell_unused
from headroom.units import gib

log = logging.getLogger(__name__)


def expert_layers(shape: ModelShape, plan: Plan) -> list[LayerExperts]:
    """Return every layer's experts, with their bytes in the format that the device holds."""
    layers = plan.settings.held(shape).layers
    return [LayerExperts(x.experts, x.expert_bytes, max(1, x.experts_used)) for x in layers]


def even_placement(shape: ModelShape, plan: Plan) -> ExpertPlacement:
    """Return the placement without statistics; refuse a budget below the floor."""
    check_floor(expert_layers(shape, plan), _budget(plan), _floor(shape))
    return even_experts(plan.devices[0].hot_by_layer)


def placed_plan(plan: Plan, placement: ExpertPlacement | None) -> Plan:
    """Return the plan with the lines of a placement; as it was where no placement is needed."""
    if placement is None:
        return plan
    return plan.placed([len(ids) for ids in placement.hot])


def named_placement(
    name: str | None, identity: str, layers: list[LayerExperts]
) -> ExpertPlacement | None:
    """Load the placement file that the options name, if they name one."""
    return load_placement(Path(name).expanduser(), identity, layers) if name else None


def find_placement(
    shape: ModelShape,
    plan: Plan,
    options: Options,
    identity: str,
    counts: ExpertCounts | None = None,  # choices of earlier runs
) -> ExpertPlacement | None:
    """Return which experts are hot; None if none is cold.

    A file that the options name comes first, then statistics, then the first experts of each layer.
    A placement that needs more memory than the plan has is refused.
    """
    device = plan.devices[0]
    tell_unused(device, options)
    if not device.total_experts:
        return None
    layers = expert_layers(shape, plan)
    named = named_placement(options.placement, identity, layers)
    if device.hot_experts == device.total_experts:
        if device.kind == "cpu":
            log.info("experts: all %d are computed by the kernels of the CPU", device.total_experts)
        elif not device.holds_all:
            log.info("experts: all %d fit in GPU memory, none is cold", device.total_experts)
            _log_memory(plan, layers)
        if named is not None:
            log.info("experts: all are hot, so that %s is not used", named.source)
        return None
    if named is not None:
        placement = named
    elif counts is not None:
        placement = place_experts(layers, counts, _budget(plan), _floor(shape))
    else:
        placement = even_placement(shape, plan)
    _check(placement, layers, plan)
    _log_memory(plan, layers)
    if named is not None:
        _warn_of_unused(named, layers, plan, shape)
    return placement if counts is None else placement.with_hit_rates(layers, counts)


def _check(placement: ExpertPlacement, layers: list[LayerExperts], plan: Plan) -> None:
    """Refuse a placement that needs more GPU or host memory than the plan has."""
    hot, budget = placement.hot_bytes(layers), _budget(plan)
    if hot > budget:
        raise PlanError(
            f"{placement.source} keeps {placement.total} experts hot, {gib(hot)}, and the plan has "
            f"{gib(budget)} for them.",
            hint="Leave out --placement, or free memory with a smaller --context or --parallel.",
        )
    host = placed_plan(plan, placement).host
    if host.free_bytes < 0:
        cold = sum(line.bytes for line in host.lines if line.name == "cold_experts")
        raise PlanError(
            f"{placement.source} leaves {gib(cold)} of experts to host memory, and "
            f"{gib(-host.free_bytes)} of that do not fit.",
            hint="Leave out --placement, or free host memory.",
        )


def _warn_of_unused(
    placement: ExpertPlacement, layers: list[LayerExperts], plan: Plan, shape: ModelShape
) -> None:
    """Warn if a placement file leaves room in the budget for another expert."""
    hot, budget = placement.hot_bytes(layers), _budget(plan)
    cold = [
        layer.expert_bytes
        for layer, ids in zip(layers, placement.hot, strict=True)
        if len(ids) < layer.experts
    ]
    if not cold or budget - hot < min(cold):
        return
    used = [layer.experts_used for layer in shape.layers]
    few = sum(len(ids) < visited for ids, visited in zip(placement.hot, used, strict=True))
    log.warning(
        "experts: %s keeps %d experts hot, %s of the %s that the plan has for them, and %s stay "
        "unused; in %d of %d layers fewer are hot than a token visits",
        placement.source,
        placement.total,
        gib(hot),
        gib(budget),
        gib(budget - hot),
        few,
        sum(layer.experts > 0 for layer in layers),
    )


def _log_memory(plan: Plan, layers: list[LayerExperts]) -> None:
    """Log what the memory of the device goes to, and what that leaves for experts."""
    device = plan.devices[0]
    sizes = {line.name: line.bytes for line in device.lines}
    log.info(
        "experts: %s has %s: weights without experts %s, cache %s, reserve %s, budget for "
        "experts %s of %s",
        device.name,
        gib(device.total_bytes),
        gib(sizes.get("core_weights", 0) + sizes.get("head", 0) + sizes.get("embeddings", 0)),
        gib(sizes.get("kv", 0) + sizes.get("recurrent_state", 0)),
        gib(sizes.get("reserve", 0)),
        gib(_budget(plan)),
        gib(_all_bytes(layers)),
    )


def _budget(plan: Plan) -> int:
    return plan.devices[0].allocated.get("hot_experts", 0)


def _all_bytes(layers: list[LayerExperts]) -> int:
    return sum(layer.experts * layer.expert_bytes for layer in layers)


def _floor(shape: ModelShape) -> int:
    return max(layer.experts_used for layer in shape.layers)
