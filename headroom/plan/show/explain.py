"""explain_line(): one line of a plan multiplied out, number by number."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headroom.errors import OptionError
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.sampler_tables import sampler_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.devices import DeviceSpec
from headroom.plan.experts import (
    STREAM_BUFFERS,
    bounce_bytes,
    expert_staging_bytes,
    largest_expert,
)
from headroom.plan.layout import Pinning
from headroom.plan.lines import (
    Line,
    StageBuffers,
    StagePlace,
    checked_row_bytes,
    core_bytes,
    embed_bytes,
    graph_parts,
    head_bytes,
    logits_rows,
    lookup_bytes,
    norm_bytes,
    outer_bytes,
)
from headroom.plan.plan import Plan
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import F32_BYTES, LayerRange, LayerShape, ModelShape
from headroom.plan.show.explain_workspace import workspace_terms
from headroom.plan.show.terms import Factor, Term, plain_term
from headroom.units import gib

KINDS = {"full": "full-attention", "window": "window", "recurrent": "recurrent"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands: a device that runs layers, or the host behind the devices."""

    name: str
    lines: tuple[Line, ...]
    spec: DeviceSpec
    settings: PlanSettings  # of the device; of host memory, those of the first device
    model: ModelShape  # with the bytes of its weights as the device's kernels hold them
    layers: tuple[LayerShape, ...]  # that run here; none of host memory
    hot_by_layer: tuple[int, ...]
    layer_range: LayerRange | None  # None: host memory

    @property
    def ends(self) -> bool:
        """Whether the last layer runs here."""
        last = len(self.model.layers) - 1
        return self.layer_range is not None and self.layer_range.last == last


def explain_line(plan: Plan, name: str) -> str:
    """Return how one line came about, multiplied out, wherever the plan has it."""
    found = [(place, line) for place in places(plan) for line in place.lines if line.name == name]
    if not found:
        names = dict.fromkeys(line.name for place in places(plan) for line in place.lines)
        raise OptionError(f"The plan has no line {name!r}.", hint=f"It has {', '.join(names)}.")
    rows = []
    for place, line in found:
        terms = line_terms(plan, place, line)
        rows.append(f"{name} on {place.name}: {line.bytes:,} bytes ({gib(line.bytes)}), {line.why}")
        rows += [f"    {term}" for term in terms]
        if len(terms) > 1:
            rows.append(f"    together {line.bytes:,} bytes")
    return "\n".join(rows)


def places(plan: Plan) -> Iterator[Place]:
    """Yield every place of a plan that has lines."""
    stages = plan.stages()
    for stage, device in zip(stages, plan.devices, strict=True):
        first, last = device.layers
        yield Place(
            name=device.name,
            lines=device.lines,
            spec=stage.device,
            settings=stage.settings,
            model=stage.model,
            layers=stage.model.layers[first : last + 1],
            hot_by_layer=device.hot_by_layer,
            layer_range=device.layers,
        )
    if plan.host.lines:
        host = next(device for device in plan.problem.devices if device.kind == "cpu")
        yield Place(
            name="host memory",
            lines=plan.host.lines,
            spec=host,
            settings=plan.settings,
            model=plan.problem.model,
            layers=(),
            hot_by_layer=(),
            layer_range=None,
        )


def line_terms(plan: Plan, place: Place, line: Line) -> list[Term]:
    """Return the products that add up to a line's bytes."""
    terms = [term for term in TERMS[line.name](plan, place, line) if term.bytes]
    assert sum(term.bytes for term in terms) == line.bytes, (line, terms)
    return terms


def _bits(size: int, values: int) -> str:
    return f"{values:,} values of {8 * size / values:.4g} bits" if values else ""


def _weights(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    settings, model = place.settings, place.model
    sizes = Counter(
        (KINDS[layer.kind], core_bytes([layer], settings), layer.core_values)
        for layer in place.layers
    )
    for (kind, size, values), count in sizes.items():
        factors = (Factor(count, f"{kind} layer"), Factor(size, "byte"))
        yield Term(factors, note=f"{_bits(size, values)} in a layer")
    assert place.layer_range is not None
    stage = StagePlace.of(place.layer_range, len(model.layers))
    outer = outer_bytes(model, settings, stage)
    yield plain_term(outer, "of the final norm and others outside the layers")


def _tables(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    """Yield the tables that a line holds; the bytes of the line tell which ones these are.

    The first device's kernels read rows of the token table, wherever it lies.
    """
    reader = plan.stages()[0] if line.name == "embeddings" else place
    settings, model = reader.settings, reader.model
    multiplied = line.name == "head" or (model.tied and len(plan.devices) == 1)
    values = model.embed_values - (0 if multiplied else model.embed_added.values)
    token_bytes = embed_bytes(model, settings, looked_up=not multiplied)
    tables = {
        "head": _table(model, head_bytes(model, settings), model.head_values),
        "token table": _table(model, token_bytes, values),
    }
    per_layer = lookup_bytes(model, settings)
    lookup = plain_term(per_layer, "of per-layer tables", _bits(per_layer, model.lookup_values))
    if line.name == "head" and tables["head"].bytes == line.bytes:
        yield tables["head"]
        return
    if line.bytes != per_layer:
        yield tables["token table"]
    if line.bytes != tables["token table"].bytes:
        yield lookup


def _table(model: ModelShape, size: int, values: int) -> Term:
    rows = values // model.hidden
    if rows and not values % model.hidden and not size % rows:
        factors = (Factor(rows, "row"), Factor(size // rows, "byte"))
        return Term(factors, note=f"{_bits(size // rows, model.hidden)} in a row")
    return plain_term(size, "", _bits(size, values))


def _hot(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    counts = zip(place.hot_by_layer, place.layers, strict=True)
    yield from _experts((count, layer.expert_bytes) for count, layer in counts)


def _cold(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    """Yield the experts that host memory holds: those that are not hot, or all of their layers."""
    copies = place.settings.keep_host_copy
    rows = [row for layers in _cold_layers(plan) for row in layers]
    yield from _experts((x.experts - (0 if copies else n), x.expert_bytes) for x, n in rows)


def _cold_layers(plan: Plan) -> list[list[tuple[LayerShape, int]]]:
    """Return the layers with cold experts of each device, with the number of hot experts."""
    return [
        [(x, n) for x, n in zip(place.layers, place.hot_by_layer, strict=True) if n < x.experts]
        for place in places(plan)
        if place.hot_by_layer
    ]


def _experts(counts: Iterator[tuple[int, int]]) -> Iterator[Term]:
    sizes: Counter[int] = Counter()
    for count, size in counts:
        sizes[size] += count
    for size, count in sizes.items():
        yield Term((Factor(count, "expert"), Factor(size, "byte")), note="gate, up and down")


def _expert_staging(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    settings, hidden = place.settings, place.model.hidden
    unpacks = settings.expert_unpack_bytes
    one = expert_staging_bytes(place.layers, hidden, 0) // 2  # without unpacking: two experts
    if not unpacks:
        yield Term((Factor(2, "buffer"), Factor(one, "byte")), "of one expert each")
        return
    buffers = bounce_bytes(place.layers)
    downs = line.bytes - one - buffers
    each = Factor(buffers // STREAM_BUFFERS, "byte")
    yield Term((Factor(STREAM_BUFFERS, "buffer"), each), "for cold experts on their way")
    yield plain_term(downs, "of unpacked down matrices")
    yield plain_term(one, "of one expert for an exchange")


def _expert_spare(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    largest = [largest_expert([x for x, _ in layers]) for layers in _cold_layers(plan)]
    for size, count in Counter(size for size in largest if size).items():
        yield Term((Factor(count, "buffer"), Factor(size, "byte")), "of the largest expert")
    if plan.host.pinning is not Pinning.PINNED and line.bytes > sum(largest):
        each = Factor((line.bytes - sum(largest)) // STREAM_BUFFERS, "byte")
        yield Term((Factor(STREAM_BUFFERS, "buffer"), each), "of pinned memory")


def _kv(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    yield from _cache(place.layers, place.settings, place.settings.pages)


def _draft_kv(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    mtp, draft = _mtp(place), plan.problem.request.draft
    layers = [mtp] if mtp is not None else [] if draft is None else list(draft.layers)
    yield from _cache(layers, place.settings, place.settings.draft_pages)


def _draft_state(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    row = Factor(place.model.hidden, "value"), Factor(F32_BYTES, "byte")
    if _mtp(place) is None:
        yield Term((Factor(place.settings.rows, "row"), *row), "of projected features")
        return
    yield Term((Factor(place.settings.parallel, "sequence"), *row))
    yield Term((Factor(place.settings.verify_rows, "row"), *row), "of a step with guesses")


def _mtp(place: Place) -> LayerShape | None:
    """Return the layer that predicts further ahead, if it guesses."""
    return place.model.mtp if place.settings.mtp else None


def _cache(layers: Sequence[LayerShape], settings: PlanSettings, lent: int) -> Iterator[Term]:
    sizes: Counter[tuple[str, int, int, int, int]] = Counter()
    for layer in layers:
        if layer.kind == "recurrent" or not layer.owns_kv or not layer.kv_heads:
            continue
        window = layer.kind == "window"
        pages = settings.window_pages(layer.window) if window else lent
        key = (KINDS[layer.kind], pages, layer.kv_heads, layer.key_dim, layer.value_dim)
        sizes[key] += 1
    for (kind, pages, heads, key_dim, value_dim), count in sizes.items():
        key_bytes = checked_row_bytes(settings.k_type, key_dim, "A key head")
        value_bytes = checked_row_bytes(settings.v_type, value_dim, "A value head")
        yield Term(
            (
                Factor(count, f"{kind} layer"),
                Factor(pages, "page"),
                Factor(settings.page_size, "token"),
                Factor(heads, "KV head"),
                Factor(key_bytes + value_bytes, "byte"),
            ),
            note=f"{key_bytes:,} of a key of {key_dim} values in {settings.k_type} and "
            f"{value_bytes:,} of a value of {value_dim} in {settings.v_type}",
        )


def _state(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    sequences = place.settings.parallel
    sizes = Counter(layer.state_values + layer.conv_values for layer in place.layers)
    for values, count in sizes.items():
        yield Term(
            (
                Factor(sequences, "sequence"),
                Factor(count, "recurrent layer"),
                Factor(values, "value"),
                Factor(F32_BYTES, "byte"),
            )
        )


def _staging(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    settings, model = place.settings, place.model
    assert place.layer_range is not None
    buffers = StageBuffers.of(model, place.layer_range, settings)
    rows, values = Factor(settings.stream_rows, "row"), Factor(model.hidden, "value")
    wide = Factor(F32_BYTES, "byte")
    yield Term((Factor(buffers.stream, "buffer"), rows, values, wide))
    yield Term((rows, Factor(buffers.side_values, "value"), wide), "of per-layer inputs")
    size = BY_NAME[settings.handover_type].bytes_for(model.hidden)
    handed = (Factor(buffers.handover, "buffer"), rows, Factor(size, "byte"))
    yield Term(handed, f"handed over in {settings.handover_type}")
    links = buffers.link_bytes(model, place.layer_range, settings)
    yield plain_term(links, "for rows from and to other workers")


def _workspace(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    if plan.problem.request.published_activation:
        yield plain_term(line.bytes, "", line.why)
    else:
        yield from workspace_terms(place.model, place.layers, place.spec, place.settings)


def _verify(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    values = sum(layer.verify_values for layer in place.layers)
    yield Term(
        (
            Factor(place.settings.verify_rows, "row"),
            Factor(values, "value"),
            Factor(F32_BYTES, "byte"),
        )
    )


def _logits(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    rows, vocab = logits_rows(place.settings), place.model.vocab
    yield Term((Factor(rows, "row"), Factor(vocab, "token"), Factor(F32_BYTES, "byte")))
    if place.spec.kind != "cpu":
        drawing = sampler_bytes(DECODE_ROWS, vocab)
        yield plain_term(drawing, f"of tables and scratch that draw tokens of {DECODE_ROWS} rows")


def _draft_weights(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    settings = place.settings
    if (mtp := _mtp(place)) is not None:
        if mtp.experts:
            yield Term((Factor(mtp.experts, "expert"), Factor(mtp.expert_bytes, "byte")))
        yield plain_term(line.bytes - mtp.all_expert_bytes, "of the layer besides experts")
        return
    draft = plan.problem.request.draft
    assert draft is not None
    for size, count in Counter(core_bytes([layer], settings) for layer in draft.layers).items():
        yield Term((Factor(count, "layer"), Factor(size, "byte")))
    yield plain_term(norm_bytes(draft, settings), "outside the layers")


def _features(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    request, rows = plan.problem.request.features, place.settings.stream_rows
    assert request is not None
    assert place.layer_range is not None
    layers = Factor(len(request.within(place.layer_range)), "layer")
    row = BY_NAME[request.type].bytes_for(place.model.hidden)
    yield Term((layers, Factor(rows, "row"), Factor(row, "byte")))


def _snapshots(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    count = place.settings.snapshots
    yield Term((Factor(count, "snapshot"), Factor(line.bytes // count, "byte")), note=line.why)


def _host_pages(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    count = place.settings.host_pages
    yield Term((Factor(count, "page"), Factor(line.bytes // count, "byte")), note=line.why)


def _graphs(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    parts = graph_parts(place.model, place.layers, place.spec, place.settings)
    for what, size in parts.items():
        yield plain_term(size, f"for {what}")


def _runtime(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    yield plain_term(line.bytes, "that we do not allocate", line.why)


def _reserve(plan: Plan, place: Place, line: Line) -> Iterator[Term]:
    spec = place.spec
    taken = max(0, spec.total_bytes - spec.available_bytes)
    driver = min(taken, spec.driver_bytes)
    kept = line.bytes - taken
    yield plain_term(kept, "kept free", "512 MiB, or a sixteenth of the memory if that is less")
    yield plain_term(driver, "held by an idle driver", "an estimate")
    yield plain_term(taken - driver, "held by others")


TERMS: dict[str, Callable[[Plan, Place, Line], Iterator[Term]]] = {
    "core_weights": _weights,
    "head": _tables,
    "embeddings": _tables,
    "hot_experts": _hot,
    "cold_experts": _cold,
    "expert_staging": _expert_staging,
    "expert_spare": _expert_spare,
    "kv": _kv,
    "recurrent_state": _state,
    "staging": _staging,
    "workspace": _workspace,
    "verify_scratch": _verify,
    "logits": _logits,
    "draft_weights": _draft_weights,
    "draft_kv": _draft_kv,
    "draft_state": _draft_state,
    "features": _features,
    "snapshots": _snapshots,
    "host_pages": _host_pages,
    "graphs": _graphs,
    "runtime": _runtime,
    "reserve": _reserve,
}
