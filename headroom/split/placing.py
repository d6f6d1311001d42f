"""find_placement(): which experts of a planned model are hot, checked against the plan."""

import logging
from collections.abc import Sequence
from dataclasses import replace
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
from headroom.kernels.cuda.expert_rules import LEAST_TOKENS
from headroom.options import Options
from headroom.plan.layout import DevicePlan
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.unused import tell_unused
from headroom.units import gib

log = logging.getLogger(__name__)


def expert_layers(shape: ModelShape, plan: Plan) -> list[LayerExperts]:
    """Return every layer's experts, with their bytes in the format that its device holds."""
    layers = [
        layer
        for device in plan.devices
        for layer in device.settings.held(shape).layers[
            device.layers.first : device.layers.last + 1
        ]
    ]
    return [LayerExperts(x.experts, x.expert_bytes, max(1, x.experts_used)) for x in layers]


def even_placement(shape: ModelShape, plan: Plan) -> ExpertPlacement:
    """Return the placement without statistics; refuse a budget below the floor."""
    for device in _cold_devices(plan):
        check_floor(_own_layers(shape, plan, device), _budget(device), _floor(shape))
    return even_experts([count for device in plan.devices for count in device.hot_by_layer])


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
    tell_unused(plan, options)
    if not plan.total_experts:
        return None
    layers = expert_layers(shape, plan)
    named = named_placement(options.placement, identity, layers)
    if not _cold_devices(plan):
        _log_all_hot(plan, shape)
        if named is not None:
            log.info("experts: all are hot, so that %s is not used", named.source)
        return None
    if named is not None:
        placement = _with_hot_devices(named, plan)
    elif counts is not None:
        placement = _placed_by_counts(shape, plan, counts)
    else:
        placement = even_placement(shape, plan)
    _check(placement, shape, plan)
    for device in _cold_devices(plan):
        _log_memory(device, _own_layers(shape, plan, device))
        if named is not None:
            _warn_of_unused(placement, device, shape, plan)
    if options.expert_pin:
        placement = _with_pins(placement, shape, plan, options, counts)
    return placement if counts is None else placement.with_hit_rates(layers, counts)


def _with_pins(
    placement: ExpertPlacement,
    shape: ModelShape,
    plan: Plan,
    options: Options,
    counts: ExpertCounts | None,
) -> ExpertPlacement:
    """Return a placement whose most chosen experts never give up their slots; warn without effect.

    Every layer with a cache keeps slots for some tokens' experts that change hands.
    """
    why = ""
    if counts is None:
        why = "there are no routing statistics, which headroom profile makes"
    elif all(device.settings.expert_policy == "static" for device in plan.devices):
        why = "no slots change hands within steps"
    if why or counts is None:
        log.warning("experts: --expert-pin has no effect here, since %s", why)
        return placement
    least = [LEAST_TOKENS * layer.experts_used for layer in shape.layers]
    pinned = placement.with_pins(options.expert_pin, counts, least)
    log.info("experts: %d never give up their slots", sum(map(len, pinned.pinned)))
    return pinned


def _cold_devices(plan: Plan) -> list[DevicePlan]:
    """Return the devices that leave experts of their layers cold."""
    return [device for device in plan.devices if device.hot_experts < device.total_experts]


def _own_layers(shape: ModelShape, plan: Plan, device: DevicePlan) -> list[LayerExperts]:
    """Return the experts of all layers, none for the layers of other devices."""
    first, last = device.layers
    return [
        layer if first <= number <= last else LayerExperts(0, 0, 1)
        for number, layer in enumerate(expert_layers(shape, plan))
    ]


def _with_hot_devices(placement: ExpertPlacement, plan: Plan) -> ExpertPlacement:
    """Return a placement in which devices that hold all experts of their layers do so."""
    hot = list(placement.hot)
    for device in plan.devices:
        if device.hot_experts == device.total_experts:
            first, last = device.layers
            hot[first : last + 1] = even_experts(device.hot_by_layer).hot
    return replace(placement, hot=tuple(hot))


def _placed_by_counts(shape: ModelShape, plan: Plan, counts: ExpertCounts) -> ExpertPlacement:
    """Return the placement by statistics: each device fills its own budget."""
    placement = even_placement(shape, plan)
    hot, source = list(placement.hot), placement.source
    for device in _cold_devices(plan):
        first, last = device.layers
        layers = _own_layers(shape, plan, device)
        own_counts = [row if first <= number <= last else () for number, row in enumerate(counts)]
        floor = _cache_floor(shape, device, layers) or _floor(shape)
        placed = place_experts(layers, own_counts, _budget(device), floor)
        hot[first : last + 1] = placed.hot[first : last + 1]
        source = placed.source
    return ExpertPlacement(tuple(hot), source)


def _log_all_hot(plan: Plan, shape: ModelShape) -> None:
    """Log that no expert is cold, and where the experts are."""
    if all(device.kind == "cpu" for device in plan.devices):
        log.info("experts: all %d are computed by the kernels of the CPU", plan.total_experts)
        return
    if not any(device.holds_all for device in plan.devices):
        log.info("experts: all %d fit in GPU memory, none is cold", plan.total_experts)
    for device in plan.devices:
        if device.total_experts and not device.holds_all:
            _log_memory(device, _own_layers(shape, plan, device))


def _check(placement: ExpertPlacement, shape: ModelShape, plan: Plan) -> None:
    """Refuse a placement that needs more GPU or host memory than the plan has."""
    for device in _cold_devices(plan):
        own = _own_layers(shape, plan, device)
        hot = sum(
            len(ids) * layer.expert_bytes for ids, layer in zip(placement.hot, own, strict=True)
        )
        if hot > _budget(device):
            first, last = device.layers
            count = sum(map(len, placement.hot[first : last + 1]))
            raise PlanError(
                f"{placement.source} keeps {count} experts hot, {gib(hot)}, and the plan has "
                f"{gib(_budget(device))} for them{_on(device, plan)}.",
                hint="Leave out --placement, or free memory with a smaller --context or "
                "--parallel.",
            )
    placed = placed_plan(plan, placement)
    missing = min([placed.host.free_bytes, *(x.free_bytes for x in placed.devices if x.holds_all)])
    if missing < 0:
        lines = [*placed.host.lines, *(line for x in placed.devices for line in x.lines)]
        cold = sum(line.bytes for line in lines if line.name == "cold_experts")
        raise PlanError(
            f"{placement.source} leaves {gib(cold)} of experts to host memory, and "
            f"{gib(-missing)} of that do not fit.",
            hint="Leave out --placement, or free host memory.",
        )


def _on(device: DevicePlan, plan: Plan) -> str:
    """Return which device is meant; "" if there is only one."""
    return f" on {device.name}" if len(plan.devices) > 1 else ""


def _warn_of_unused(
    placement: ExpertPlacement, device: DevicePlan, shape: ModelShape, plan: Plan
) -> None:
    """Warn if a placement file leaves room in a device's budget for another expert."""
    layers, budget = _own_layers(shape, plan, device), _budget(device)
    rows = [
        (ids, layer, used)
        for ids, layer, used in zip(
            placement.hot, layers, (x.experts_used for x in shape.layers), strict=True
        )
        if layer.experts
    ]
    hot = sum(len(ids) * layer.expert_bytes for ids, layer, _ in rows)
    cold = [layer.expert_bytes for ids, layer, _ in rows if len(ids) < layer.experts]
    if not cold or budget - hot < min(cold):
        return
    log.warning(
        "experts: %s keeps %d experts hot, %s of the %s that the plan has for them, and %s stay "
        "unused; in %d of %d layers fewer are hot than a token visits",
        placement.source,
        sum(len(ids) for ids, _, _ in rows),
        gib(hot),
        gib(budget),
        gib(budget - hot),
        sum(len(ids) < used for ids, _, used in rows),
        len(rows),
    )


def _log_memory(device: DevicePlan, layers: list[LayerExperts]) -> None:
    """Log what the memory of a device goes to, and what that leaves for experts."""
    sizes = {line.name: line.bytes for line in device.lines}
    log.info(
        "experts: %s has %s: weights without experts %s, cache %s, reserve %s, budget for "
        "experts %s of %s",
        device.name,
        gib(device.total_bytes),
        gib(sizes.get("core_weights", 0) + sizes.get("head", 0) + sizes.get("embeddings", 0)),
        gib(sizes.get("kv", 0) + sizes.get("recurrent_state", 0)),
        gib(sizes.get("reserve", 0)),
        gib(_budget(device)),
        gib(sum(layer.experts * layer.expert_bytes for layer in layers)),
    )


def _budget(device: DevicePlan) -> int:
    return device.allocated.get("hot_experts", 0)


def _cache_floor(shape: ModelShape, device: DevicePlan, layers: Sequence[LayerExperts]) -> int:
    """Return the hot experts with which every layer can have a cache.

    0 if slots do not change hands within steps, or if the budget does not hold so many.
    """
    floor = LEAST_TOKENS * _floor(shape)
    needed = sum(min(floor, layer.experts) * layer.expert_bytes for layer in layers)
    has_caches = device.settings.expert_policy != "static"
    return floor if has_caches and needed <= _budget(device) else 0


def _floor(shape: ModelShape) -> int:
    return max(layer.experts_used for layer in shape.layers)
