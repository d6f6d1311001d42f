"""Workspace: the scratch of a step on a CPU, or on a GPU without fused kernels."""

from collections.abc import Sequence

from headroom.kernels.native import scratch
from headroom.kernels.reference.sizes import KEY_BLOCK, QUERY_TILE, ROW_TILE, UNPACK_VALUES
from headroom.machine.devices import DeviceSpec
from headroom.plan.device_scratch import DeviceStep, device_phases
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import F32_BYTES, LayerShape, ModelShape


def workspace_phases(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> dict[str, int]:
    """Return the scratch of each phase of a step; they follow each other, so the largest counts.

    All row buffers are f32; the residual stream and its normed copy are staging, not scratch.
    Checked 2026-11-15 on SmolLM2 with the plain kernels on x86-64: measured peaks of a step were 9
    to 12% below staging, logits and this line together with unpacked weights, 35 to 36% with
    packed ones, whose scratch is counted for the type that needs most.
    """
    if settings.uses_arena:
        return device_phases(layers, device_step(model.hidden, settings))
    if settings.kernels == "native":
        native = {
            "layer": max(native_layer_scratch(model.hidden, layer, settings) for layer in layers)
        }
        if any(layer.experts for layer in layers):
            native["experts"] = max(
                native_experts_scratch(model.hidden, layer, settings) for layer in layers
            )
        return native
    # Reference kernels keep more copies than fused ones.
    plain = device.kind == "cpu" or settings.kernels == "reference"
    row = F32_BYTES * settings.rows
    phases = {
        "mixer": row * max(mixer_width(layer, plain) for layer in layers),
        "feed-forward": row * (2 + 2 * plain) * max(ffn_width(layer) for layer in layers),
    }
    if not plain:
        # Copied from host memory.
        phases["feed-forward"] += 2 * max(layer.expert_bytes for layer in layers)
        return phases
    # The outputs of all experts of a row are kept until they are summed up.
    phases["feed-forward"] += row * model.hidden * max(layer.experts_used for layer in layers)
    phases["mixer"] += KEY_BLOCK * F32_BYTES * 2 * max(sum(layer.kv_values) for layer in layers)
    padded = -(-settings.parallel // ROW_TILE) * ROW_TILE
    phases["head"] = 2 * padded * model.vocab * F32_BYTES
    if settings.weights == "packed" or settings.compute_type != "f32":
        widest = max(model.hidden, *(ffn_width(layer) for layer in layers))
        phases["feed-forward"] += _unpacking(model.hidden * widest)
        phases["head"] += _unpacking(model.hidden * model.vocab)
    return phases


def device_step(hidden: int, settings: PlanSettings) -> DeviceStep:
    """Return the sizes on which the scratch of a GPU's step depends."""
    return DeviceStep(
        hidden=hidden,
        rows=settings.rows,
        spans=settings.parallel + 1,
        context=settings.context,
        unpack_bytes=settings.unpack_bytes,
        halves=settings.compute_type == "f16",
    )


def native_layer_scratch(hidden: int, layer: LayerShape, settings: PlanSettings) -> int:
    """Return the scratch of one layer in the C++ kernels, if every sequence fills its context."""
    sizes = native_layer_sizes(hidden, layer)
    return scratch.layer_scratch(sizes, settings.rows, (settings.context,) * settings.parallel)


def native_layer_sizes(hidden: int, layer: LayerShape) -> scratch.LayerSizes:
    """Return the widths of a layer that the C++ kernels run in one call."""
    keys, values = layer.kv_values
    return scratch.LayerSizes(
        hidden=hidden,
        queries=layer.query_heads * layer.key_dim,
        keys=keys,
        values=values,
        ffn_width=layer.ffn_width,
        heads=layer.query_heads,
        head_dim=layer.value_dim,
    )


def native_experts_scratch(hidden: int, layer: LayerShape, settings: PlanSettings) -> int:
    """Return the scratch of one layer's routed experts in the C++ kernels."""
    return scratch.experts_scratch(
        settings.rows, layer.experts_used, hidden, layer.expert_width, layer.experts
    )


def _unpacking(values: int) -> int:
    """Return the scratch of unpacking a weight part by part.

    A value takes 4 bytes for the f32 of the last part, and 6 to 13.3 bytes, by type, for the
    temporaries of the next part (measured 2026-11-15 on the reference decoders; mxfp4 needs most).
    """
    return 18 * min(values, UNPACK_VALUES)


def mixer_width(layer: LayerShape, plain: bool) -> int:
    """Return the values of one row inside the mixer, all held at once.

    Fused attention holds queries, keys, values and output. The plain kernel also holds queries in
    tiles, two partial sums, three copies of the scores of one block of keys, two masks of them,
    and the block itself once for every tile of queries.
    """
    if layer.kind == "recurrent":
        return layer.mixer_width
    queries, output = layer.query_heads * layer.key_dim, layer.query_heads * layer.value_dim
    fused = queries + layer.kv_heads * (layer.key_dim + layer.value_dim) + output
    if not plain:
        return fused
    scores = layer.query_heads * KEY_BLOCK
    masks = -(-layer.query_heads // max(1, layer.kv_heads)) * KEY_BLOCK * 2 // F32_BYTES
    block = layer.kv_heads * max(layer.key_dim, layer.value_dim) * KEY_BLOCK // QUERY_TILE
    return fused + queries + 2 * output + 3 * scores + masks + block


def ffn_width(layer: LayerShape) -> int:
    """Return the values between up and down of one row: the dense part and its experts."""
    return layer.ffn_width + layer.experts_used * layer.expert_width
