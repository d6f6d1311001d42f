"""What holds for every plan, whatever the model, the device and the settings."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headroom.memory.devices import DeviceSpec
from headroom.memory.plan import DoesNotFitError, Plan, make_plan
from headroom.memory.shape import LayerShape, ModelShape
from headroom.options import Options
from headroom.units import GIB, MIB
from tests.memory.shapes import cpu, gpu, host

kinds = st.sampled_from(["cpu", "gpu", "two", "three"])
percents = st.integers(20, 105)


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    kinds = draw(st.lists(st.sampled_from(["full", "window", "recurrent"]), min_size=2, max_size=6))
    experts = draw(st.sampled_from([0, 16]))
    hidden = draw(st.sampled_from([256, 1024]))
    layers = tuple(
        LayerShape(
            kind=kind,  # type: ignore[arg-type]
            core_bytes=20 * MIB + index * MIB,
            core_values=40 * MIB,
            query_heads=16,
            kv_heads=0 if kind == "recurrent" else 16,
            key_dim=128,
            value_dim=128,
            window=512 if kind == "window" else 0,
            ffn_width=2 * hidden,
            experts=experts,
            experts_used=min(2, experts),
            expert_width=hidden if experts else 0,
            expert_bytes=(10 + index % 2) * MIB if experts else 0,
            expert_values=20 * MIB if experts else 0,
            state_values=65536 if kind == "recurrent" else 0,
            state_heads=4 if kind == "recurrent" else 0,
            mixer_width=4 * hidden if kind == "recurrent" else 0,
        )
        for index, kind in enumerate(kinds)
    )
    tied = draw(st.booleans())
    return ModelShape(
        name="made up",
        architecture="llama",
        hidden=hidden,
        vocab=8192,
        context_limit=draw(st.sampled_from([300, 4096, 32768])),
        layers=layers,
        embed_bytes=8192 * hidden,
        embed_values=8192 * hidden,
        head_bytes=0 if tied else 8192 * hidden,
        head_values=0 if tied else 8192 * hidden,
        ffn_width=2 * hidden,
    )


def fixed_options() -> st.SearchStrategy[Options]:
    return st.builds(
        Options,
        context=st.sampled_from([None, None, 128, 300]),
        parallel=st.sampled_from([None, None, 1, 7]),
        chunk=st.sampled_from([None, None, 16, 512, 1000]),
        kv_type=st.sampled_from([None, "q8_0", "f16"]),
        weights=st.sampled_from(["auto", "packed", "unpacked"]),
    )


def machine(kind: str, model: ModelShape, options: Options, percent: int) -> list[DeviceSpec]:
    """Return devices with so much of the memory that the model would like to have."""
    roomy = make_plan([model], [cpu(1000)], options)
    wanted = sum(line.bytes for line in roomy.devices[0].lines) / GIB
    size = wanted * percent / 100
    if kind == "cpu":
        return [cpu(size)]
    if kind == "gpu":
        return [gpu(size), host(4)]
    if kind == "three" and len(model.layers) > 2:
        slow = replace(gpu(size / 2, "cuda:2", sm=75), bandwidth=300e9)
        return [gpu(size / 2, "cuda:0"), gpu(size / 3, "cuda:1"), slow, host(4)]
    return [gpu(size / 2, "cuda:0"), gpu(size / 3, "cuda:1"), host(4)]


def plan_or_none(model: ModelShape, devices: list[DeviceSpec], options: Options) -> Plan | None:
    try:
        return make_plan([model], devices, options)
    except DoesNotFitError:
        return None


def rank(plan: Plan | None) -> tuple[int, ...]:
    """Return how good a plan is, in the order of sacrifice."""
    if plan is None:
        return (-1,)
    hot = sum(device.hot_experts for device in plan.devices)
    chosen = plan.settings
    return (int(chosen.chunk >= 128), chosen.context, hot, chosen.parallel, chosen.chunk)


@settings(max_examples=60, deadline=None)
@given(models(), kinds, percents, fixed_options())
def test_the_lines_never_exceed_a_device_unless_the_plan_does_not_fit(
    model: ModelShape, kind: str, percent: int, options: Options
) -> None:
    devices = machine(kind, model, options, percent)
    try:
        plan = make_plan([model], devices, options)
        assert plan.fits
    except DoesNotFitError as error:
        plan = error.plan
        assert not plan.fits
    over = [x for x in (*plan.devices, plan.host) if sum(y.bytes for y in x.lines) > x.total_bytes]
    assert plan.fits == (not over)
    assert all(line.bytes > 0 for device in plan.devices for line in device.lines)


@settings(max_examples=60, deadline=None)
@given(models(), kinds, percents, st.integers(0, 80), fixed_options())
def test_more_memory_never_gives_a_worse_plan(
    model: ModelShape, kind: str, percent: int, more: int, options: Options
) -> None:
    small = plan_or_none(model, machine(kind, model, options, percent), options)
    large = plan_or_none(model, machine(kind, model, options, percent + more), options)
    assert rank(large) >= rank(small)


@settings(max_examples=60, deadline=None)
@given(models(), kinds, percents, fixed_options(), st.sets(st.sampled_from(range(5))))
def test_fixing_what_the_solver_chose_gives_the_same_plan(
    model: ModelShape, kind: str, percent: int, options: Options, which: set[int]
) -> None:
    devices = machine(kind, model, options, percent)
    plan = plan_or_none(model, devices, options)
    assume(plan is not None)
    assert plan is not None
    chosen = plan.settings
    values = {
        "context": chosen.context, "parallel": chosen.parallel, "chunk": chosen.chunk,
        "weights": chosen.weights,
    }  # fmt: skip
    fixed = {name: value for index, (name, value) in enumerate(values.items()) if index in which}
    if len(plan.devices) > 1 and 4 in which:
        shares = (device.layers[1] - device.layers[0] + 1 for device in plan.devices)
        fixed["split"] = ",".join(map(str, shares))
    assert make_plan([model], devices, replace(options, **fixed)) == plan  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(models(), kinds, percents, fixed_options())
def test_what_the_user_fixed_stands_in_every_plan(
    model: ModelShape, kind: str, percent: int, options: Options
) -> None:
    plan = plan_or_none(model, machine(kind, model, options, percent), options)
    assume(plan is not None)
    assert plan is not None
    for name in ("context", "parallel", "chunk"):
        wanted = getattr(options, name)
        assert wanted is None or getattr(plan.settings, name) == wanted


@settings(max_examples=30, deadline=None)
@given(models(), kinds, percents, fixed_options())
def test_a_plan_is_the_same_every_time(
    model: ModelShape, kind: str, percent: int, options: Options
) -> None:
    devices = machine(kind, model, options, percent)
    assert plan_or_none(model, devices, options) == plan_or_none(model, devices, options)
