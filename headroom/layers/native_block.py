"""NativeBlock: a whole decoder layer in one call of the C++ module."""

from dataclasses import replace

import torch

from headroom.families.config import AttentionConfig
from headroom.kernels.native import layer as native
from headroom.layers.attention import pair_rows, rope_tables
from headroom.layers.batch import Batch
from headroom.layers.cache import KvPages
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource

# In the order of `native.LayerMatrices`.
MATRICES = ("attn.q", "attn.k", "attn.v", "attn.out", "ffn.gate", "ffn.up", "ffn.down")


class NativeBlock:
    """A layer of attention and a dense network, without Python between its operations."""

    def __init__(
        self,
        config: AttentionConfig,
        eps: float,
        get: WeightSource,
        pages: KvPages,
        scratch: torch.Tensor,  # shared by all layers of the stage, which run one after another
    ) -> None:
        self._rope = config.rope
        self._scratch = scratch
        self._pages = pages
        # A string, because Python keeps its hash: every layer looks this key up in every step.
        self._key = f"fused layers of {pages.ring} pages, {config.rope}"
        orders = {
            "attn.q": pair_rows(config, config.heads),
            "attn.k": pair_rows(config, config.kv_heads),
        }
        self._layer = native.NativeLayer(
            native.LayerMatrices(*(get(name, orders.get(name)) for name in MATRICES)),
            attention_norm=get.norm("attn.norm"),
            ffn_norm=get.norm("ffn.norm"),
            eps=eps,
            sizes=_head_sizes(config),
            scale=config.scale,
            cache=pages.kv,
            dtype=get.case.dtype,
        )

    @part_of_step("fused")
    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer, in the memory of `x`."""
        cos, sin, step = batch.shared(self._key, lambda: self._shared(batch))
        self._layer.run(x, cos, sin, step, self._scratch)
        return x

    def _shared(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, native.Step]:
        """Return what all layers with this rotation and kind of pages read of a step."""
        view = self._pages.view(batch)
        return *rope_tables(self._rope, batch), native.Step(view.spans, view.kv_slots)


def refuses_native_block(config: AttentionConfig, get: WeightSource, pages: KvPages) -> str | None:
    """Return why the C++ module cannot run this layer in one call; None if it can."""
    if config.head_norms or config.value_norm or config.gate != "none" or config.keys_are_values:
        return "its attention has norms or gates of its own"
    if config.biases or config.out_bias or config.sinks:
        return "its attention has biases or sinks"
    case = replace(get.case, k_type=pages.kv.k_type.name, v_type=pages.kv.v_type.name)
    quants = [get.tensors[get.prefix + name].quant for name in MATRICES]
    return native.refuses(case, quants, _head_sizes(config))


def _head_sizes(config: AttentionConfig) -> native.HeadSizes:
    return native.HeadSizes(config.heads, config.kv_heads, config.head_dim, config.window)
