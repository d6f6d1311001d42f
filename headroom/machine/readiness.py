"""Readiness: why a GPU of this machine cannot run layers; decided from facts, without torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headroom.kernels.cuda.sizes import BF16_SM
from headroom.units import counted, gib

LEAST_SM = 75  # tensor cores for 8-bit products, and the instructions that kernels are written in
LEAST_TORCH = (2, 8)  # on CUDA: products of 16-bit numbers that are summed and returned in float32
# The least major version of NVIDIA's driver that starts each major version of CUDA.
DRIVERS = {11: 450, 12: 525, 13: 580}
SAME_SIZE = 0.1  # relative; tools differ in whether they count what the driver holds


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch was built for, and the GPUs that it sees."""

    version: str
    cuda: str | None = None  # the CUDA version it was built for
    hip: str | None = None  # the ROCm version it was built for
    problem: str = ""  # why it cannot start CUDA, or ROCm
    count: int = 0  # GPUs that it sees
    archs: tuple[str, ...] = ()  # of its own kernels: "sm_90", "compute_120", "gfx1100"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU, and who holds it, most first."""

    free_bytes: int
    total_bytes: int
    holders: tuple[Holder, ...] = ()  # empty if they are hidden or were not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What is known about one GPU, apart from its use of memory."""

    name: str  # "cuda:0", "hip:0"
    product: str = ""
    sm: int = 0  # 10 x major + minor; 0 where unknown
    gfx: str = ""  # AMD's name of the architecture; "" where unknown
    driver: str = ""
    total_bytes: int = 0  # as the driver reports it; 0 if it does not
    limit_bytes: int = 0  # most memory that an engine may take; 0: all
    listed: int = 0  # GPUs that the driver lists; 0 where that is not known
    torch_product: str = ""  # the product name that torch reports for this device
    torch_bytes: int = 0
    compiler: str = ""  # why kernels cannot be compiled; "" if they can, or it was not tried
    full: GpuMemory | None = None  # set if the GPU has no room for a kernel

    @property
    def is_amd(self) -> bool:
        """Whether it is an AMD GPU, which runs Triton's kernels."""
        return self.name.startswith("hip")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a device cannot be used, and what to try."""

    message: str
    hint: str


def refuse_gpu(torch: TorchFacts, gpu: GpuFacts, dtype: str | None = None) -> Refusal | None:
    """Return why a GPU cannot run layers that compute in `dtype`; None if it can."""
    if gpu.is_amd:
        return (
            _refuse_build(torch, "ROCm", torch.hip)
            or _refuse_start(torch, gpu)
            or _refuse_other(torch, gpu)
            or _refuse_gfx(torch, gpu)
            or _refuse_compiler(gpu)
        )
    return (
        _refuse_build(torch, "CUDA", torch.cuda)
        or _refuse_version(torch)
        or _refuse_start(torch, gpu)
        or _refuse_other(torch, gpu)
        or _refuse_sm(torch, gpu, dtype)
        or _refuse_compiler(gpu)
    )


def _refuse_build(torch: TorchFacts, system: str, version: str | None) -> Refusal | None:
    if version is not None:
        return None
    built = "CPUs alone"
    if torch.hip or torch.cuda:
        built = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}"
    return Refusal(
        f"torch {torch.version} is built for {built}, without {system}.",
        f"Install a {system} build of torch, or choose --device cpu.",
    )


def _refuse_version(torch: TorchFacts) -> Refusal | None:
    """Refuse a torch that is too old for our kernels; accept a version that is not a number."""
    found = re.match(r"(\d+)\.(\d+)", torch.version)
    if found is None or (int(found[1]), int(found[2])) >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return Refusal(
        f"torch {torch.version} is too old for a GPU: the kernels need {least} or later, whose "
        "products of 16-bit numbers are summed in float32.",
        f"Install torch {least} or later, or choose --device cpu.",
    )


def _refuse_start(torch: TorchFacts, gpu: GpuFacts) -> Refusal | None:
    """Refuse where CUDA or ROCm does not start, or starts without this GPU."""
    system = f"ROCm {torch.hip}" if gpu.is_amd else f"CUDA {torch.cuda}"
    hides = "HIP_VISIBLE_DEVICES" if gpu.is_amd else "CUDA_VISIBLE_DEVICES"
    needed = DRIVERS.get(_major(torch.cuda or ""))
    if torch.problem and gpu.driver and needed and _major(gpu.driver) < needed:
        return Refusal(
            f"The NVIDIA driver {gpu.driver} is too old for {system}, which torch "
            f"{torch.version} was built for: it needs {needed} or later.",
            "Update the driver, or install a torch built for an older CUDA.",
        )
    if torch.problem:
        driver = f"the driver {gpu.driver}" if gpu.driver else "the driver"
        return Refusal(
            f"torch {torch.version} ({system}) does not start on {gpu.name}, which "
            f"{driver} lists: {torch.problem.rstrip('.')}.",
            f"After an update of the driver a restart may be due; {hides} or a container may "
            "hide the GPU.",
        )
    kind, _, index = gpu.name.partition(":")
    if int(index) >= torch.count:
        return Refusal(
            f"torch sees {counted(torch.count, 'GPU')}, and {gpu.name} is not one of them.",
            f"{hides} may hide it; torch counts what is left from {kind}:0 on.",
        )
    return None


def _refuse_other(torch: TorchFacts, gpu: GpuFacts) -> Refusal | None:
    """Refuse a name that means one card to the driver and another one to torch."""
    if gpu.listed == torch.count == 1:
        return _refuse_part(gpu)
    names = [re.sub(r"nvidia|\s", "", x.lower()) for x in (gpu.product, gpu.torch_product)]
    renamed = all(names) and names[0] != names[1]
    sizes = gpu.total_bytes, gpu.torch_bytes
    resized = all(sizes) and abs(sizes[0] - sizes[1]) > SAME_SIZE * max(sizes)
    if not resized and (gpu.is_amd or not renamed):
        return None
    told = f"{gpu.product or 'a card'} with {gib(gpu.total_bytes)}"
    return Refusal(
        f"{gpu.name} is {told} to the driver and {gpu.torch_product} with "
        f"{gib(gpu.torch_bytes)} to torch: they count this machine's GPUs differently, or one sees "
        "a part of a card.",
        "Unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES."
        if gpu.is_amd
        else "Set CUDA_DEVICE_ORDER=PCI_BUS_ID: both count alike then.",
    )


def _refuse_part(gpu: GpuFacts) -> Refusal | None:
    """Refuse a part (MIG) of the machine's only card, whose name may differ from the card's.

    The part is accepted if --device-memory is at most its size.
    """
    missing = gpu.total_bytes - gpu.torch_bytes
    if not gpu.torch_bytes or missing <= SAME_SIZE * gpu.total_bytes:
        return None
    if 0 < gpu.limit_bytes <= gpu.torch_bytes:
        return None
    size = gib(gpu.torch_bytes)
    return Refusal(
        f"{gpu.name} is {gpu.product or 'a card'} with {gib(gpu.total_bytes)} to the driver, and "
        f"torch sees a part of it: {gpu.torch_product} with {size}.",
        f"Plan for the part: --device-memory with a size below {size}.",
    )


def _refuse_gfx(torch: TorchFacts, gpu: GpuFacts) -> Refusal | None:
    """Refuse an AMD GPU that torch has no kernels for."""
    if not torch.archs or not gpu.gfx or gpu.gfx in {x.partition(":")[0] for x in torch.archs}:
        return None
    return Refusal(
        f"torch {torch.version} has no kernels for {gpu.gfx} of {gpu.name}, only for "
        f"{', '.join(torch.archs)}.",
        "Install a torch that was built for it, or choose --device cpu.",
    )


def _refuse_sm(torch: TorchFacts, gpu: GpuFacts, dtype: str | None) -> Refusal | None:
    """Refuse a GPU that is too old for our kernels, for a type, or for torch's own kernels."""
    what = f"{gpu.name} ({gpu.product})" if gpu.product else gpu.name
    if gpu.sm < LEAST_SM:
        return Refusal(
            f"{what} is sm_{gpu.sm}; the kernels need sm_{LEAST_SM}, and bf16 sm_{BF16_SM}.",
            "Choose --device cpu.",
        )
    if dtype == "bf16" and gpu.sm < BF16_SM:
        return Refusal(
            f"{what} is sm_{gpu.sm}; products in bf16 need sm_{BF16_SM}.",
            "Leave --dtype out, or choose f16 or f32.",
        )
    if torch.archs and not has_kernels_for(torch.archs, gpu.sm):
        return Refusal(
            f"torch {torch.version} has no kernels for sm_{gpu.sm} of {what}, only for "
            f"{', '.join(torch.archs)}.",
            "Install a torch that was built for it, or choose --device cpu.",
        )
    return None


def _refuse_compiler(gpu: GpuFacts) -> Refusal | None:
    if not gpu.compiler:
        return None
    if (memory := gpu.full) is not None:
        return Refusal(
            f"{gpu.name} has {gib(memory.free_bytes)} of {gib(memory.total_bytes)} free, too "
            f"little to start CUDA and load a kernel; {_held_rest(memory.holders)}.",
            "End what holds it, or choose another --device.",
        )
    return Refusal(
        f"Kernels cannot be compiled for {gpu.name}: {gpu.compiler.rstrip('.')}.",
        "Triton comes with ROCm builds of torch, or choose --device cpu."
        if gpu.is_amd
        else "NVRTC comes with CUDA builds of torch; see headroom doctor --kernels.",
    )


def has_kernels_for(archs: Sequence[str], sm: int) -> bool:
    """Return whether code for one of the architectures runs on a GPU of a compute capability."""
    for arch in archs:
        if found := re.fullmatch(r"(sm|compute)_(\d+)[a-z]?", arch):
            number = int(found[2])
            # sm_ code runs on later GPUs of its generation, compute_ code (PTX) on all later ones.
            same = found[1] == "compute" or number // 10 == sm // 10
            if same and number <= sm:
                return True
    return False


def refuse_memory(name: str, needed: int, memory: GpuMemory) -> Refusal | None:
    """Return why a plan that needs so many bytes does not fit a GPU now; None if it fits."""
    if needed <= memory.free_bytes:
        return None
    return Refusal(
        f"{name} has {gib(memory.free_bytes)} of {gib(memory.total_bytes)} free and the plan needs "
        f"{gib(needed)}; {_held_rest(memory.holders)}.",
        "End what holds it, or plan again with a smaller --context, --parallel or --chunk.",
    )


def held_by_others(name: str, held: int, holders: Sequence[Holder]) -> Refusal:
    """Return the error of a model that would fit if other processes held less of a GPU."""
    return Refusal(
        f"It would fit if others did not hold {gib(held)} of {name}: "
        f"{_told(holders) or 'who they are is not known'}.",
        "End what holds it.",
    )


def _held_rest(holders: Sequence[Holder]) -> str:
    return f"{_told(holders)} hold the rest" if holders else "who holds the rest is not known"


def _told(holders: Sequence[Holder]) -> str:
    return ", ".join(f"{who.name} (pid {who.pid}) {gib(who.bytes)}" for who in holders)


def out_of_memory(
    while_: str, name: str, planned: int, allocated: int, memory: GpuMemory
) -> Refusal:
    """Return the error of a GPU that ran out of memory although the plan had some left."""
    held = _told(memory.holders)
    others = f"{held} hold memory, too" if held else "no other process is known to hold any"
    return Refusal(
        f"{name} ran out of memory while {while_}: {gib(allocated)} of {gib(planned)} planned were "
        f"allocated, and {gib(memory.free_bytes)} of {gib(memory.total_bytes)} are free; {others}.",
        "Choose a smaller --context, --parallel or --chunk, or end what else holds its memory.",
    )


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
