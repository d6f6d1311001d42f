"""Plan: what goes where, decided before loading; make_plan() is the only way to get one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

from headroom.errors import OptionError, PlanError
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.expert_rules import LEAST_TOKENS
from headroom.machine.devices import DeviceSpec
from headroom.machine.precision import Precision, common_precision, device_precision
from headroom.machine.targets import is_this_machine
from headroom.options import (
    EXACT_TYPE,
    FEATURE_TYPES,
    MOST_GUESSES,
    MTP,
    ROUNDED_TYPES,
    Options,
)
from headroom.plan.cost_model import KEPT_FOR_CHUNK, ColdSpeeds
from headroom.plan.device_scratch import unpack_bytes_for
from headroom.plan.experts import check_expert_budget, floor_bytes, parse_expert_budget
from headroom.plan.layout import DevicePlan, HostPlan, Layout, Pinning, biggest_line, lay_out
from headroom.plan.lines import (
    core_bytes,
    embed_bytes,
    head_bytes,
    host_page_bytes,
    mtp_page_bytes,
    mtp_snapshot_bytes,
    snapshot_bytes,
)
from headroom.plan.predict import Prediction, predict
from headroom.plan.settings import (
    PAGE_SIZE,
    FeatureRequest,
    PlanRequest,
    PlanSettings,
    PlanStage,
    held_shape,
)
from headroom.plan.shape import F32_BYTES, LayerShape, ModelShape
from headroom.plan.sharing import parse_split
from headroom.plan.solver import (
    Candidate,
    CountHotExperts,
    Ranges,
    chunk_choices,
    context_choices,
    down_to_one,
    open_ranges,
    solve,
)
from headroom.units import gib, parse_size

COLD_CHUNKS = (2048, 1024, 512, 256)  # choices of prompt tokens per step if experts are cold
# Snapshots for the prefix cache, unless --cache-ram says how much memory they may take.
USUAL_SNAPSHOTS = 16
SNAPSHOT_SHARE = 16  # they take at most one part in so many of host memory
MOST_SNAPSHOTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes where, with every setting decided."""

    model: str
    fits: bool
    settings: PlanSettings  # with the types and kernels of the first device; each has its own
    devices: tuple[DevicePlan, ...]
    host: HostPlan
    precision: Precision
    lossy: tuple[str, ...]  # named choices that change results
    notes: tuple[str, ...]  # what a user should know and no line says
    predicted: Prediction
    problem: "PlanProblem" = field(repr=False, compare=False)  # the problem that this plan solves

    @property
    def known_threads(self) -> int | None:
        """The CPU threads, by --threads or by this machine's cores; None for another machine."""
        options = self.problem.options
        known = options.threads is not None or is_this_machine(options)
        return self.settings.threads if known else None

    @property
    def missing_bytes(self) -> int:
        """What the devices and the host lack, together; 0 if the plan fits."""
        devices = sum(max(0, -device.free_bytes) for device in self.devices)
        return devices + (max(0, -self.host.free_bytes) if self.host.lines else 0)

    @property
    def hot_experts(self) -> int:
        """Routed experts in the memory of the devices that run their layers."""
        return sum(device.hot_experts for device in self.devices)

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers."""
        return sum(device.total_experts for device in self.devices)

    @property
    def cold_speeds(self) -> ColdSpeeds | None:
        """The speeds for cold experts of the first device that has some; None: none has."""
        return next((x.cold_speeds for x in self.devices if x.cold_speeds is not None), None)

    def placed(self, hot_by_layer: Sequence[int]) -> "Plan":
        """Return the plan of a placement that keeps so many experts of each layer hot.

        Experts of different layers have different sizes, so the bytes of hot and cold experts
        depend on the placement. No setting changes.
        """
        return _plan(self.problem, self.stages(), hot_by_layer)

    def stages(self, **changes: Any) -> list[PlanStage]:
        """Return the devices that run layers with their settings, or with changed ones."""
        return [
            PlanStage(kind.device, replace(device.settings, **changes), kind.model)
            for kind, device in zip(self.problem.kinds, self.devices, strict=True)
        ]


class DoesNotFitError(PlanError):
    """The model does not fit; carries the plan that fails and settings that would fit."""

    def __init__(self, message: str, *, hint: str, plan: Plan, nearest: tuple[str, ...]) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan
        self.nearest = nearest  # flags to try, nearest first


@dataclass(frozen=True, slots=True)
class StageKind:
    """A device that runs layers, with what does not depend on the settings that are solved for."""

    device: DeviceSpec
    policy: str  # the precision policy's type for it, the default for computing and the KV cache
    compute_type: str  # of matrix products: int24 by default where C++ kernels hold packed weights
    kernels: str  # as in PlanSettings
    unpack_bytes: int  # as in PlanSettings
    model: ModelShape  # with the bytes of its weights as these kernels hold them

    @classmethod
    def of(cls, device: DeviceSpec, model: ModelShape, options: Options) -> "StageKind":
        """Return a device with the types and kernels that the options leave it."""
        policy = device_precision(device).type
        kernels = _kernels(device, options)
        rounds = kernels == "native" and options.weights != "unpacked" and model.packed
        compute_type = options.dtype or (EXACT_TYPE if rounds else policy)
        unpack_bytes = 0 if device.kind == "cpu" else unpack_bytes_for(device.total_bytes)
        held = held_shape(model, kernels, compute_type)
        return cls(device, policy, compute_type, kernels, unpack_bytes, held)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A planning problem: all inputs of a plan but the settings that the solver chooses."""

    kinds: tuple[StageKind, ...]  # one for each device that runs layers
    devices: tuple[DeviceSpec, ...]
    options: Options
    precision: Precision  # of all devices together
    request: PlanRequest

    @property
    def model(self) -> ModelShape:
        """The model as the kernels of the first device hold it."""
        return self.kinds[0].model

    def stages(self, chosen: Candidate, weights: str) -> tuple[PlanStage, ...]:
        """Return the devices that run layers, with all settings of a candidate.

        The policy's type is the default of three types, each with its own option: computing and
        KV cache, for each device its own, and rows that are handed from one device to the next.
        """
        options = self.options
        shared = PlanSettings(
            context=chosen.context,
            parallel=chosen.parallel,
            chunk=chosen.chunk,
            cache_tokens=chosen.cache_pages * PAGE_SIZE,
            k_type="",
            v_type="",
            compute_type="",
            handover_type=self.handover_type,
            weights=weights,
            threads=options.threads or self._threads,
            pin_threads=options.pin_threads,
            cold=options.cold,
            pin_experts=not options.no_pin,
            keep_host_copy=options.keep_host_copy,
            exact_batch=options.exact_batch,
            prefix_cache=not options.no_prefix_cache,
            draft_tokens=self.draft_tokens,
            mtp=self.options.draft == MTP,
        )
        stages = []
        for kind in self.kinds:
            kv_type = options.kv_type or kind.policy
            settings = replace(
                shared,
                k_type=options.k_type or kv_type,
                v_type=options.v_type or kv_type,
                compute_type=kind.compute_type,
                kernels=kind.kernels,
                unpack_bytes=kind.unpack_bytes,
                threads=kind.device.cores if kind.device.worker else shared.threads,
                worker=kind.device.worker,
            )
            stages.append(PlanStage(kind.device, settings, kind.model))
        snapshots, pages = self._snapshots(stages), self._host_pages(stages)
        return tuple(
            PlanStage(x.device, replace(x.settings, snapshots=snapshots, host_pages=pages), x.model)
            for x in stages
        )

    def _snapshots(self, stages: Sequence[PlanStage]) -> int:
        """Return how many snapshots the memory for them holds; each stage has its part of all."""
        each = self._snapshot_bytes(stages)
        if not each:  # pages alone are enough
            return 0
        room = self.request.snapshot_bytes
        if self.request.host_page_bytes:
            room = min(room, self.request.host_page_bytes // 2)
        return min(self.request.most_snapshots, room // each)

    def _host_pages(self, stages: Sequence[PlanStage]) -> int:
        """Return how many pages host memory holds beside the snapshots; each stage has its part."""
        each = max(
            host_page_bytes((*x.model.layers, *self._draft_layers), x.settings)
            + mtp_page_bytes(x.model, x.settings)
            for x in stages
        )
        if not each:  # all layers have windows or states, and pages hold nothing
            return self._snapshots(stages) * stages[0].settings.sequence_pages
        room = self.request.host_page_bytes
        room -= self._snapshots(stages) * self._snapshot_bytes(stages)
        return max(0, room // each)

    def _snapshot_bytes(self, stages: Sequence[PlanStage]) -> int:
        """Return the bytes of a snapshot with its logits; 0 if pages alone are enough."""
        each = max(
            snapshot_bytes((*x.model.layers, *self._draft_layers), x.settings)
            + mtp_snapshot_bytes(x.model, x.settings)
            for x in stages
        )
        return each + self.model.vocab * F32_BYTES if each else 0

    @property
    def _draft_layers(self) -> tuple[LayerShape, ...]:
        return () if self.request.draft is None else self.request.draft.layers

    @property
    def draft_tokens(self) -> int:
        """Tokens that are guessed for a sequence at a time, by the draft or without a model."""
        if self.request.draft is not None:  # usually a chain that fills the block
            return self.options.draft_tokens or min(self.request.draft.block - 1, MOST_GUESSES)
        return self.options.most_guesses

    @property
    def handover_type(self) -> str:
        """The type of rows between devices: the policy's, or f32 if products are to be in f32.

        Who asks for products in f32 wants answers that do not depend on the devices.
        """
        exact = "f32" if self.options.dtype == "f32" else self.precision.type
        return self.options.activation_dtype or exact

    @property
    def _threads(self) -> int:
        """Return the CPU threads: all cores, or with a GPU one less for the engine thread."""
        cores = max((device.cores for device in self.devices), default=0)
        fed = any(kind.device.kind != "cpu" for kind in self.kinds)
        return max(1, cores - 1 if fed else cores)

    @property
    def native(self) -> bool:
        """Whether C++ kernels run all layers; they read packed weights."""
        return all(kind.kernels == "native" for kind in self.kinds)

    def lay_out(self, stages: Sequence[PlanStage], placed: Sequence[int] | None = None) -> Layout:
        """Return the best layout for settings, or the layout of a given placement of experts."""
        return lay_out(stages, self.devices, self.request, placed)

    def solve(self, ranges: Ranges, weights: str) -> Candidate | None:
        """Return the best choice of the settings that the ranges leave open; None if none fits."""

        def count_hot(candidate: Candidate) -> int | None:
            layout = self.lay_out(self.stages(candidate, weights))
            return layout.hot_experts if layout.fits else None

        found = solve(ranges, count_hot)
        if found is None or self.options.chunk is not None or not self._may_have_cold:
            return found
        hot = count_hot(found)
        if hot is None or hot == self.model.total_experts:
            return found
        return self._with_best_chunk(found, ranges, count_hot)

    def _with_best_chunk(
        self, found: Candidate, ranges: Ranges, count_hot: CountHotExperts
    ) -> Candidate:
        """Return the candidate with the best trade-off of chunk and hot experts, if some are cold.

        Every chunk of a prompt waits for all cold experts, so that a prompt in chunks of half the
        length takes twice as long. Decoding hardly slows down with 3 % fewer hot experts. The
        choice of a chunk does not depend on the other choices, and the rest is solved as if the
        chunk were fixed: a user who fixes the chosen chunk gets the same plan.
        """

        def worth(chunk: int) -> tuple[float, int]:
            hot = count_hot(ranges.least(found.context, ranges.parallels[-1], chunk))
            return (-1 if hot is None else hot * KEPT_FOR_CHUNK ** -log2(chunk)), chunk

        longer = [x for x in COLD_CHUNKS if found.chunk < x <= found.context]
        chunk = max((found.chunk, *longer), key=worth)
        if chunk == found.chunk:
            return found
        return (
            solve(replace(ranges, contexts=(found.context,), chunks=(chunk,)), count_hot) or found
        )

    @property
    def _may_have_cold(self) -> bool:
        holds_all = any(kind.device.holds_all for kind in self.kinds)
        return bool(self.model.total_experts) and not holds_all


def _kernels(device: DeviceSpec, options: Options) -> str:
    """Return which kernels run the layers of a device: a GPU's own, or C++ kernels on a CPU."""
    wanted = options.kernels
    if device.kind == "hip":
        return "triton" if wanted == "auto" else wanted
    if device.kind != "cpu":
        return "cuda" if wanted == "auto" else wanted
    computes = wanted != "reference" and options.dtype in (None, *ROUNDED_TYPES, "f32")
    return "native" if computes and device.native else "reference"


def make_plan(
    shapes: Sequence[ModelShape],
    devices: Sequence[DeviceSpec],
    options: Options,
    features: FeatureRequest | None = None,  # layers whose output rows are kept of every step
) -> Plan:
    """Return the best plan that fits, or raise an error that says what would fit."""
    if options.dtype in ROUNDED_TYPES and options.weights == "unpacked":
        raise OptionError(
            f"Unpacked weights are floats, which have no {options.dtype} products.",
            hint="Leave out --weights unpacked, or choose --dtype f32.",
            param="weights",
        )
    if options.kernels == "triton" and all(x.kind == "cpu" for x in devices if x.runs_layers):
        raise OptionError(
            "Triton's kernels run on GPUs, and no layer is on one.",
            hint="Leave out --kernels triton, or choose a GPU as --device.",
            param="kernels",
        )
    if options.dtype in ROUNDED_TYPES and not _has_rounded_products(devices, options):
        raise OptionError(
            f"{options.dtype} products need the C++ kernels of a CPU, which do not run here.",
            hint="Choose --dtype f32, or leave out --kernels reference; see headroom doctor.",
            param="dtype",
        )
    if options.draft is None and shapes[0].mtp is not None and _may_verify(devices):
        options = replace(options, draft=MTP)
    if options.drafts and options.draft_model is None:
        check_verifies(devices)
    if options.draft == MTP and shapes[0].mtp is None:
        raise _no_mtp(shapes[0])
    model, draft = shapes[0], shapes[1] if len(shapes) > 1 else None
    stages = [device for device in devices if device.runs_layers]
    options = _with_read_types(model, stages, options)
    kinds = tuple(StageKind.of(device, model, options) for device in stages)
    if draft is not None:
        draft = _held_draft(draft, stages[-1], options)
        features = _draft_features(draft, options, features)
    if features is not None:
        _check_features(features, len(model.layers))
    request = replace(_request(kinds[0].model, draft, devices, options), features=features)
    problem = PlanProblem(kinds, tuple(devices), options, common_precision(stages), request)
    if problem.request.expert_bytes is not None and any(not device.holds_all for device in stages):
        check_expert_budget(problem.model.layers, problem.request.expert_bytes)
    ranges = open_ranges(options, model.context_limit, model.context_end)
    weights = "packed" if options.weights == "auto" else options.weights
    chosen = problem.solve(ranges, weights)
    if chosen is None and options.cache_ram is None and request.snapshot_bytes:
        problem = replace(problem, request=replace(request, snapshot_bytes=0))
        chosen = problem.solve(ranges, weights)
    if chosen is None:
        raise _refusal(problem, ranges, weights)
    if options.weights == "auto" and _unpacks_well(problem, ranges, chosen):
        weights = "unpacked"
    plan = _plan(problem, problem.stages(chosen, weights))
    _check_cold(plan, options)
    return _with_cache(problem, plan)


def _with_read_types(model: ModelShape, stages: Sequence[DeviceSpec], options: Options) -> Options:
    """Return options under which products can read all weights, or refuse the model.

    On a CPU, matrices of types without packed products are unpacked when they are loaded. The
    reference kernels read every type, and unpack each weight in each step.
    """
    gpus = [device.name for device in stages if device.kind != "cpu"]
    if gpus and model.cpu_only:
        raise PlanError(
            f"{model.name} runs on CPUs only: {model.cpu_only}.",
            hint="Choose --device cpu.",
            param="device",
        )
    if options.kernels == "reference" or not (model.unread_types or model.unread_expert_types):
        return options
    if gpus:
        types = ", ".join(dict.fromkeys((*model.unread_types, *model.unread_expert_types)))
        raise PlanError(
            f"{model.name} has weights of {types}, which no kernel of a GPU reads.",
            hint="Choose another quantisation of the model, or --device cpu.",
        )
    if model.unread_expert_types:
        raise PlanError(
            f"{model.name} has experts of {', '.join(model.unread_expert_types)}, which no fast "
            "kernel reads.",
            hint="Choose another quantisation of the model; --kernels reference computes these "
            "experts, far slower.",
        )
    if options.weights == "packed" or options.dtype in ROUNDED_TYPES:
        named = "--weights packed" if options.weights == "packed" else f"--dtype {options.dtype}"
        raise PlanError(
            f"{model.name} has weights of {', '.join(model.unread_types)}, which no product reads "
            "packed.",
            hint=f"Leave out {named}: they are unpacked to floats when they are loaded.",
            param=named.split()[0].removeprefix("--"),
        )
    return replace(options, weights="unpacked")


def _held_draft(draft: ModelShape, device: DeviceSpec, options: Options) -> ModelShape:
    """Return a draft with the bytes of its weights as the kernels of the last stage hold them."""
    if draft.unread_types and options.kernels != "reference" and options.weights != "unpacked":
        raise PlanError(
            f"{draft.name} has weights of {', '.join(draft.unread_types)}, which no product reads "
            "packed.",
            hint="Choose another quantisation of the draft.",
            param="draft",
        )
    return StageKind.of(device, draft, options).model


def _draft_features(
    draft: ModelShape, options: Options, features: FeatureRequest | None
) -> FeatureRequest:
    """Return which output rows of the target its draft reads."""
    if features is not None:
        raise OptionError(
            "Features of other layers than those that a draft reads cannot be kept.",
            hint="Leave out --draft.",
            param="draft",
        )
    return FeatureRequest(draft.tap_layers, options.feature_dtype)


def _may_verify(devices: Sequence[DeviceSpec]) -> bool:
    """Return whether all devices that run layers verify guesses: the CPUs of this process."""
    return all(x.kind == "cpu" and not x.worker for x in devices if x.runs_layers)


def _no_mtp(model: ModelShape) -> OptionError:
    """Return the error for a prediction head that is asked for and cannot be had."""
    why = model.mtp_refused or "its file has none"
    return OptionError(
        f"{model.name} has no prediction head that runs: {why}.",
        hint="Choose --draft ngram or --draft none.",
        param="draft",
    )


def check_verifies(devices: Sequence[DeviceSpec]) -> None:
    """Refuse guesses if a device that runs layers cannot verify them."""
    gpus = [device.name for device in devices if device.runs_layers and device.kind != "cpu"]
    if gpus:
        raise OptionError(
            f"Only CPUs verify guessed tokens so far, and {' and '.join(gpus)} would run layers.",
            hint="Choose --draft none, or --device cpu.",
            param="draft",
        )


def _check_features(features: FeatureRequest, layers: int) -> None:
    """Refuse layers that the model does not have, and types that cannot hold their rows."""
    wanted = features.layers
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(layers)):
        raise PlanError(
            f"Features of the layers {', '.join(map(str, wanted)) or 'none'} were asked for.",
            hint=f"Name each layer once, by its number from 0 to {layers - 1}.",
        )
    if features.type not in FEATURE_TYPES:
        raise PlanError(
            f"Features cannot be kept in {features.type}.",
            hint=f"Choose from {', '.join(FEATURE_TYPES)}.",
        )


def _with_cache(problem: PlanProblem, plan: Plan) -> Plan:
    """Return the plan with a cache of experts, if slots may change hands and host memory has room.

    A cache needs every expert in host memory, pinned, where the GPU can read it.
    """
    policy, settings = problem.options.expert_policy, plan.settings
    if policy == "static" or not _has_cold(plan.devices):
        return plan
    why = ""
    if not all(x.settings.uses_arena for x in plan.devices if x.cold_speeds is not None):
        why = "no fused kernels of a GPU run this model's layers"
    elif settings.cold not in ("auto", "gpu"):
        why = f"with --cold {settings.cold} no expert crosses the link"
    elif not settings.pin_experts:
        why = "with --no-pin the GPU cannot read host memory"
    elif not _has_room_for_cache(problem.model, plan.devices):
        why = f"no layer has slots for the experts of {LEAST_TOKENS} tokens"
    if not why:
        found = _plan(problem, plan.stages(keep_host_copy=True, expert_policy=policy))
        if not found.fits and problem.options.cache_ram is None:  # slots are worth more
            stages = plan.stages(keep_host_copy=True, expert_policy=policy, snapshots=0)
            found = _plan(problem, stages)
        if found.fits and found.host.pinning is Pinning.PINNED:
            return found
        held = sum(line.bytes for line in found.host.lines if line.name == "cold_experts")
        why = f"host memory cannot hold and pin all experts of layers with cold ones, {gib(held)}"
    if policy == "auto":
        return plan
    raise OptionError(
        f"--expert-policy {policy} cannot be had: {why}.",
        hint="Choose --expert-policy auto, which takes what there is.",
        param="expert_policy",
    )


def _has_room_for_cache(model: ModelShape, devices: Sequence[DevicePlan]) -> bool:
    """Return whether the slots of a layer with cold experts hold those of some tokens."""
    hot = [count for device in devices for count in device.hot_by_layer]
    return any(
        LEAST_TOKENS * layer.experts_used <= count < layer.experts
        for layer, count in zip(model.layers, hot, strict=True)
    )


def _check_cold(plan: Plan, options: Options) -> None:
    """Refuse --cold gpu with --no-pin: a GPU reads only pinned memory."""
    if _has_cold(plan.devices) and options.no_pin and options.cold == "gpu":
        raise OptionError(
            "--cold gpu needs pinned memory: a GPU does not read what --no-pin leaves in place.",
            hint="Leave out --no-pin, or choose --cold cpu.",
            param="cold",
        )


def _has_cold(devices: Sequence[DevicePlan]) -> bool:
    return any(device.hot_experts < device.total_experts for device in devices)


def _has_rounded_products(devices: Sequence[DeviceSpec], options: Options) -> bool:
    """Return whether every stage is a CPU with C++ kernels that may be used."""
    stages = [device for device in devices if device.runs_layers]
    return options.kernels == "auto" and all(x.kind == "cpu" and x.native for x in stages)


def _request(
    model: ModelShape, draft: ModelShape | None, devices: Sequence[DeviceSpec], options: Options
) -> PlanRequest:
    budget = options.expert_budget
    stages = sum(device.runs_layers for device in devices)
    return PlanRequest(
        split=parse_split(options.split, stages) if options.split else (),
        expert_bytes=parse_expert_budget(budget, model.expert_bytes) if budget else None,
        published_activation=options.activation_model == "published",
        draft=draft,
        snapshot_bytes=_snapshot_bytes(devices, options),
        host_page_bytes=_snapshot_bytes(devices, options) if options.cache_ram else 0,
        most_snapshots=MOST_SNAPSHOTS if options.cache_ram else USUAL_SNAPSHOTS,
    )


def _snapshot_bytes(devices: Sequence[DeviceSpec], options: Options) -> int:
    """Return the host memory that snapshots may take: as the user says, or a share of it."""
    if options.no_prefix_cache:
        return 0
    if options.cache_ram:
        return parse_size(options.cache_ram, "cache_ram")
    host = next((device for device in devices if device.kind == "cpu"), None)
    return 0 if host is None else host.total_bytes // SNAPSHOT_SHARE


def _plan(
    problem: PlanProblem, stages: Sequence[PlanStage], placed: Sequence[int] | None = None
) -> Plan:
    layout = problem.lay_out(stages, placed)
    return Plan(
        model=problem.model.name,
        fits=layout.fits,
        settings=stages[0].settings,
        devices=layout.devices,
        host=layout.host,
        precision=problem.precision,
        lossy=tuple(_lossy(problem, layout)),
        notes=tuple(_notes(problem, layout)),
        predicted=predict(stages, problem.devices, layout),
        problem=problem,
    )


def _lossy(problem: PlanProblem, layout: Layout) -> Iterable[str]:
    """Yield the choices that round more than the model's own arithmetic does."""
    by_device = [
        (device.name, list(_rounded(kind, device.settings)))
        for kind, device in zip(problem.kinds, layout.devices, strict=True)
    ]
    alike = all(found == by_device[0][1] for _, found in by_device)
    for name, found in by_device[:1] if alike else by_device:
        yield from (choice if alike else f"{choice} on {name}" for choice in found)
    if problem.options.cold == "drop" and _has_cold(layout.devices):
        yield "cold experts are left out, and the weights of a row's hot ones grow instead"


def _rounded(kind: StageKind, settings: PlanSettings) -> Iterable[str]:
    """Yield the settings of one device that round more than its types do."""
    for word, name in (("keys", settings.k_type), ("values", settings.v_type)):
        if BY_NAME[name].bytes_for(32) < BY_NAME[kind.policy].bytes_for(32):
            yield f"cached {word} are kept in {name}"
    if settings.compute_type == "int8":
        yield "products round their activations to 8 bits per 32 columns"


def _notes(problem: PlanProblem, layout: Layout) -> Iterable[str]:
    """Yield what a user should know and no line says."""
    yield (
        f"reading the weights fills up to {gib(problem.model.weight_bytes)} of file cache, which "
        "the kernel gives back when memory is short"
    )
    # Dropped experts are neither read in place nor copied for prompts.
    pinning = layout.host.pinning if problem.options.cold != "drop" else None
    if pinning is Pinning.TURNED_OFF:
        yield (
            "cold experts are not pinned: only the CPU reads them in place, and long prompts copy "
            "them twice"
        )
    elif pinning is Pinning.OVER_LIMIT:
        yield (
            "cold experts that are not pinned are copied twice; more memory for the control group "
            "avoids it"
        )
    if problem.request.expert_bytes != 0 and _has_cold(layout.devices) and not layout.hot_experts:
        yield (
            "all experts are cold: as many as one token visits would take "
            f"{gib(floor_bytes(problem.model.layers))}, and less is left for them"
        )
    for kind in problem.kinds:
        slow = kind.kernels == "reference" and problem.options.kernels == "auto"
        if slow and kind.device.kind == "cpu" and kind.compute_type != "f32":
            yield (
                f"products in {kind.compute_type} run on the slow reference kernels of a CPU; "
                "its C++ kernels compute in f32, int24 and int8"
            )


def _unpacks_well(problem: PlanProblem, ranges: Ranges, chosen: Candidate) -> bool:
    """Return whether unpacked weights leave all other settings as they are and take at most half of
    the memory.

    Only CPUs without C++ kernels unpack weights at load: the reference kernels would otherwise
    unpack every weight in every step.
    """
    if problem.native:
        return False
    if any(device.kind != "cpu" for device in problem.devices) or problem.model.total_experts:
        return False
    model, settings = problem.model, problem.stages(chosen, "unpacked")[0].settings
    weights = core_bytes(model.layers, settings)
    weights += embed_bytes(model, settings) + head_bytes(model, settings)
    half = sum(device.available_bytes for device in problem.devices) // 2
    return weights <= half and problem.solve(ranges, "unpacked") == chosen


def _refusal(problem: PlanProblem, ranges: Ranges, weights: str) -> DoesNotFitError:
    least = ranges.candidate(ranges.contexts[-1], ranges.parallels[-1], ranges.chunks[-1])
    plan = _plan(problem, problem.stages(least, weights))
    places = {device.name: device for device in plan.devices} | {"host memory": plan.host}
    name, worst = min(places.items(), key=lambda place: place[1].free_bytes)
    line, missing = biggest_line(worst.lines), -worst.free_bytes
    nearest = tuple(_nearest(problem, ranges, weights))
    hint = f"Try {' or '.join(nearest[:3])}." if nearest else "Try a smaller model or quantisation."
    return DoesNotFitError(
        f"{problem.model.name} does not fit: {name} has {gib(worst.total_bytes)} and "
        f"{gib(missing)} are missing; the biggest line is {line.name}, {gib(line.bytes)} "
        f"({line.why}).",
        hint=hint,
        plan=plan,
        nearest=nearest,
    )


def _nearest(problem: PlanProblem, ranges: Ranges, weights: str) -> Iterable[str]:
    """Yield the flags that make it fit: one setting changed, then all of them."""
    options = problem.options
    if options.draft == MTP:
        plain = replace(problem, options=replace(options, draft="none"))
        if plain.solve(ranges, weights):
            yield "--draft none"
    looser = {
        "--chunk": replace(ranges, chunks=chunk_choices(ranges.chunks[0])),
        "--cache-tokens": replace(ranges, cache_pages=None, cache_may_shrink=True),
        "--parallel": replace(ranges, parallels=down_to_one(ranges.parallels[0])),
        "--context": replace(ranges, contexts=context_choices(ranges.contexts[0])),
    }
    for flag, wider in looser.items():
        if wider != ranges and (found := problem.solve(wider, weights)):
            yield f"{flag} {_value(flag, found)}"
    if weights == "unpacked" and problem.solve(ranges, "packed"):
        yield "--weights packed"
    if options.kv_type is None and options.k_type is None and options.v_type is None:
        narrow = replace(problem, options=replace(options, kv_type="q8_0"))
        if narrow.solve(ranges, weights):
            yield "--kv-type q8_0"
    widest = Ranges(
        contexts=looser["--context"].contexts,
        parallels=looser["--parallel"].parallels,
        chunks=looser["--chunk"].chunks,
        cache_pages=None,
        cache_may_shrink=False,
    )
    if widest != ranges and (found := problem.solve(widest, weights)):
        yield " ".join(f"{flag} {_value(flag, found)}" for flag in looser)


def _value(flag: str, found: Candidate) -> int:
    values = {
        "--chunk": found.chunk,
        "--cache-tokens": found.cache_pages * PAGE_SIZE,
        "--parallel": found.parallel,
        "--context": found.context,
    }
    return values[flag]
