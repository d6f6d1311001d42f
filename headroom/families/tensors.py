"""Groups of tensors from which families build their tables, named as in a GGUF file."""

from headroom.families.dims import Dims, LayerDims, Tensors

# Prefixes of the tensors for pictures and sound in GGUF files of a whole model: two towers, and
# what leads from them to the text model.
GGUF_TOWERS = ("v.", "a.", "mm.")


def inner_name(name: str) -> str:
    """Return the name of a tensor without the prefix of its layer."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def outer_tensors(dims: Dims) -> Tensors:
    """Return the tensors outside the layers that most families have: norm, embedding, head."""
    tensors: Tensors = {
        "output_norm.weight": (dims.hidden,),
        "token_embd.weight": (dims.vocab, dims.hidden),
    }
    if not dims.tied:
        tensors["output.weight"] = (dims.vocab, dims.hidden)
    return tensors


def plain_layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer of grouped attention and a gated feed-forward network."""
    tensors = norms(dims, "attn_norm", "ffn_norm") | attention(
        dims.hidden, dims.heads, dims.kv_heads, dims.head_dim
    )
    return LayerDims(
        tensors=tensors | dense_ffn(dims.hidden, dims.ffn_width(index)),
        kind=dims.kind(index),
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn_width(index),
    )


def norms(dims: Dims, *names: str) -> Tensors:
    """Return norms over the hidden size by these names."""
    return {f"{name}.weight": (dims.hidden,) for name in names}


def head_norms(head_dim: int) -> Tensors:
    """Return the norms of queries and keys, over one head."""
    return {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Tensors:
    """Return the four projections of grouped attention."""
    return {
        "attn_q.weight": (heads * head_dim, hidden),
        "attn_k.weight": (kv_heads * head_dim, hidden),
        "attn_v.weight": (kv_heads * head_dim, hidden),
        "attn_output.weight": (hidden, heads * head_dim),
    }


def dense_ffn(hidden: int, width: int) -> Tensors:
    """Return the three matrices of a gated feed-forward network."""
    return {
        "ffn_gate.weight": (width, hidden),
        "ffn_up.weight": (width, hidden),
        "ffn_down.weight": (hidden, width),
    }


def routed_experts(dims: Dims) -> Tensors:
    """Return the router and the stacks of routed experts."""
    return {"ffn_gate_inp.weight": (dims.experts, dims.hidden), **expert_stacks(dims)}


def expert_stacks(dims: Dims) -> Tensors:
    """Return the stacks of routed experts; gate and up lie in one stack where they are fused."""
    experts, width, hidden = dims.experts, dims.expert_ffn, dims.hidden
    down: Tensors = {"ffn_down_exps.weight": (experts, hidden, width)}
    if dims.fused_experts:
        return {"ffn_gate_up_exps.weight": (experts, 2 * width, hidden)} | down
    return {
        "ffn_gate_exps.weight": (experts, width, hidden),
        "ffn_up_exps.weight": (experts, width, hidden),
    } | down


def shared_expert(dims: Dims) -> Tensors:
    """Return the matrices of the expert that every token visits."""
    return {
        "ffn_gate_shexp.weight": (dims.shared_ffn, dims.hidden),
        "ffn_up_shexp.weight": (dims.shared_ffn, dims.hidden),
        "ffn_down_shexp.weight": (dims.hidden, dims.shared_ffn),
    }
