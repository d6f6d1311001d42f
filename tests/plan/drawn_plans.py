"""Plans that hypothesis draws: published models on machines of any size, fitting or not."""

from functools import cache

from hypothesis import strategies as st

from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.shape import ModelShape
from tests.plan.shapes import cpu, gpu, host

MODELS = (
    "smollm2-135m:q4_1", "qwen3-30b-a3b:q4_k_m", "qwen3.6-27b:q6_k", "qwen3.6-35b-a3b:q4_k_m",
    "laguna-xs.2:mxfp4", "gemma-4-e4b:q8_0", "gemma-4-26b-a4b:bf16", "ministral-3-3b:f16",
)  # fmt: skip
DRAFTS = {"qwen3.6-27b:q6_k": "qwen3.6-27b-dflash"}


@cache
def shapes_of(name: str, drafted: bool) -> list[ModelShape]:
    """Return the shapes of a model and, if wanted and published, of its draft."""
    names = [name, *([DRAFTS[name]] if drafted and name in DRAFTS else [])]
    return [known_shape(one) for one in names]


def machine(kind: str, gibibytes: float) -> list[DeviceSpec]:
    """Return the devices of a machine whose GPUs have so much memory each."""
    return {
        "cpu": [cpu(gibibytes, taken=gibibytes / 8)],
        "gpu": [gpu(gibibytes), host(2 * gibibytes)],
        "two": [gpu(gibibytes), gpu(gibibytes / 2, "cuda:1"), host(64)],
        "mixed": [gpu(gibibytes), cpu(48)],
    }[kind]


@st.composite
def drawn_plans(draw: st.DrawFn) -> Plan:
    """Draw a plan; one that does not fit is a plan, too."""
    name = draw(st.sampled_from(MODELS))
    options = Options(
        context=draw(st.sampled_from([None, 512, 8192])),
        parallel=draw(st.sampled_from([None, 1, 3])),
        kv_type=draw(st.sampled_from([None, "q8_0"])),
        cold=draw(st.sampled_from(["auto", "drop"])),
        no_pin=draw(st.booleans()),
        keep_host_copy=draw(st.booleans()),
        cache_ram=draw(st.sampled_from([None, "1GiB"])),
        activation_model=draw(st.sampled_from(["own", "published"])),
        weights=draw(st.sampled_from(["auto", "unpacked"])),
    )
    kind = draw(st.sampled_from(["cpu", "gpu", "two", "mixed"]))
    devices = machine(kind, draw(st.sampled_from([2, 6, 12, 24, 80])))
    try:
        return make_plan(shapes_of(name, draw(st.booleans())), devices, options)
    except DoesNotFitError as error:
        return error.plan
