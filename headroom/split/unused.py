"""tell_unused(): logs options that were given but have no effect on the devices that run."""

import logging
from dataclasses import fields, replace
from typing import Any

from headroom.options import Options, flag
from headroom.plan.plan import Plan
from headroom.plan.settings import holds_cold

log = logging.getLogger(__name__)

GPU_OPTIONS = ("device_memory",)
BUDGET_OPTIONS = ("expert_budget",)
EXCHANGE_OPTIONS = (
    "swap_every",
    "swap_bytes",
    "swap_min_gain",
    "swap_false_chance",
    "swap_per_layer",
)
SPLIT_OPTIONS = {
    "split": "the share of layers for each device",
    "activation_dtype": "the type of rows that one device hands to the next",
}
COLD_OPTIONS = (
    *("cold", "no_pin", "keep_host_copy", "expert_policy", "expert_pin"),
    *EXCHANGE_OPTIONS,
)


def tell_unused(plan: Plan, options: Options, where: str = "here") -> None:
    """Log the options on splits, experts or GPUs that have no effect on the planned devices.

    Without a GPU that is a warning, because the user expected one. Where slots change hands within
    steps, which is the default, it is a warning, too.
    """
    devices = plan.devices
    if len(devices) == 1:
        for name, what in SPLIT_OPTIONS.items():
            if getattr(options, name) is not None:
                log.warning(
                    "plan: without effect %s: --%s is %s, and all layers are on %s",
                    where,
                    name.replace("_", "-"),
                    what,
                    devices[0].name,
                )
    if options.draft_model is None and (given := _given(options, ("feature_dtype",))):
        log.warning("plan: without effect %s: %s; no draft model is named", where, given[0])
    if options.exact_batch and all(device.kind == "cpu" for device in devices):
        log.warning(
            "plan: without effect on answers %s: --exact-batch; on a CPU, a row's products never "
            "depend on other rows",
            where,
        )
    names: tuple[str, ...] = COLD_OPTIONS
    level = logging.INFO
    if all(device.kind == "cpu" for device in devices):
        names, level = GPU_OPTIONS + BUDGET_OPTIONS + COLD_OPTIONS, logging.WARNING
        why = "the model runs on the CPU, which has no cold experts"
    elif not plan.total_experts:
        names, why = BUDGET_OPTIONS + COLD_OPTIONS, "the model has no routed experts"
    elif plan.hot_experts == plan.total_experts:
        why = "all experts are hot"
    elif not holds_cold(options.cold, options.keep_host_copy):
        names = ("no_pin", "expert_policy", *EXCHANGE_OPTIONS)
        why = "cold experts are left out and held nowhere"
    elif any(device.settings.expert_policy != "static" for device in devices):
        names, level = EXCHANGE_OPTIONS, logging.WARNING
        why = "decode steps fill the slots of experts themselves, and nothing is exchanged"
    else:
        return
    if flags := _given(options, names):
        log.log(level, "experts: without effect %s, since %s: %s", where, why, ", ".join(flags))


def tell_unmeasured(options: Options) -> None:
    """Log the options on exchanges that have no effect while speeds are measured."""
    if flags := _given(options, (*EXCHANGE_OPTIONS, "save_placement")):
        log.info("experts: without effect while speeds are measured: %s", ", ".join(flags))


def without_gpu_options(options: Options) -> Options:
    """Return the options with the defaults for GPU memory and experts."""
    changed = {*GPU_OPTIONS, *BUDGET_OPTIONS, *COLD_OPTIONS}
    usual: dict[str, Any] = {x.name: x.default for x in fields(options) if x.name in changed}
    return replace(options, **usual)


def without_plan_options(options: Options) -> Options:
    """Return the options with the defaults of those that only `headroom plan` obeys.

    An engine allocates nothing for them, so that its plan must not count them either. They come
    from variables or a config file, because no other command has their flags. A run obeys --ram.
    """
    names = tuple(
        setting.name
        for setting in fields(options)
        if setting.metadata["group"] == "plan" and setting.name != "ram"
    )
    if flags := _given(options, names):
        log.warning("plan: only headroom plan obeys %s; a run ignores them", ", ".join(flags))
    usual: dict[str, Any] = {x.name: x.default for x in fields(options) if x.name in names}
    return replace(options, **usual)


def _given(options: Options, names: tuple[str, ...]) -> list[str]:
    """Return the flags that were given, without those that turn something off."""
    known = {setting.name: setting for setting in fields(options)}
    usual = {name: (known[name].default, "off") for name in names}
    return [flag(known[name]) for name in names if getattr(options, name) not in usual[name]]
