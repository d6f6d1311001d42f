"""The scratch of a step on a CPU, against figures worked out by hand."""

from headroom.plan.workspace import workspace_phases
from tests.plan.shapes import cpu, gpu, laguna, settings, smollm2


def test_workspace_on_a_cpu_follows_the_plain_kernels() -> None:
    model = smollm2()
    phases = workspace_phases(model, model.layers, cpu(8), settings(weights="unpacked"))
    row = 576 * 2 + 384 + 576 * 3 + 3 * 9 * 128 + 3 * 128 * 2 // 4 + 192 * 16
    assert phases == {
        "mixer": 513 * row * 4 + 128 * 4 * 2 * 384,
        "feed-forward": 513 * 4 * 1536 * 4,
        "head": 2 * 16 * 49152 * 4,
    }


def test_packed_weights_on_a_cpu_need_room_to_unpack_into() -> None:
    model = smollm2()
    plain = workspace_phases(model, model.layers, cpu(8), settings(weights="unpacked"))
    packed = workspace_phases(model, model.layers, cpu(8), settings())
    assert packed["feed-forward"] - plain["feed-forward"] == 576 * 1536 * 18
    assert packed["head"] - plain["head"] == (4 << 20) * 18  # the head goes in parts


def test_scratch_never_grows_with_the_context() -> None:
    model = smollm2()
    short = workspace_phases(model, model.layers, cpu(8), settings(context=512, cache_tokens=512))
    assert short == workspace_phases(model, model.layers, cpu(8), settings())


def test_a_gpu_holds_fewer_copies_and_two_cold_experts_on_their_way() -> None:
    model = laguna()
    phases = workspace_phases(model, model.layers, gpu(22), settings(kernels="triton"))
    assert phases == {
        "mixer": 513 * 4 * (2 * 64 * 128 + 2 * 8 * 128),
        "feed-forward": 513 * 4 * 2 * 8192 + 2 * 2_039_808,
    }


def test_plain_kernels_keep_as_many_copies_on_a_gpu_as_on_a_cpu() -> None:
    model, asked = smollm2(), settings(kernels="reference")
    on_cpu, on_gpu = (workspace_phases(model, model.layers, x, asked) for x in (cpu(8), gpu(8)))
    assert on_gpu == on_cpu
