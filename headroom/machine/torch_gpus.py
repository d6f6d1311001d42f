"""What torch and the kernel compilers report about this machine's GPUs, for `readiness`."""

import warnings
from dataclasses import replace

import torch

from headroom.errors import DeviceError, is_out_of_memory
from headroom.kernels.cuda.probe import try_compiler
from headroom.kernels.triton.launch import triton_missing
from headroom.machine.devices import torch_name
from headroom.machine.drivers import gpu_holders
from headroom.machine.gpus import driver_memory
from headroom.machine.readiness import GpuFacts, GpuMemory, TorchFacts


def read_torch() -> TorchFacts:
    """Return what torch was built for, and whether CUDA starts (torch calls ROCm CUDA, too)."""
    facts = TorchFacts(
        version=torch.__version__, cuda=torch.version.cuda, hip=getattr(torch.version, "hip", None)
    )
    if facts.cuda is None and facts.hip is None:
        return facts
    with warnings.catch_warnings():  # the error that follows says the same
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return replace(facts, problem=str(error).partition("\n")[0])
    return replace(facts, count=torch.cuda.device_count(), archs=tuple(torch.cuda.get_arch_list()))


def read_gpu(known: GpuFacts, torch_facts: TorchFacts) -> GpuFacts:
    """Return the facts about a GPU, completed by what torch and a trial compilation say of it.

    A GPU that torch does not see keeps the facts that are known already.
    """
    index = int(known.name.partition(":")[2])
    # A torch built for the other maker (NVIDIA or AMD) numbers that maker's GPUs.
    built = torch_facts.hip if known.is_amd else torch_facts.cuda
    if built is None or index >= torch_facts.count:
        return known
    properties = torch.cuda.get_device_properties(index)
    known = replace(
        known,
        product=known.product or properties.name,
        torch_product=properties.name,
        torch_bytes=properties.total_memory,
    )
    if known.is_amd:
        gfx = getattr(properties, "gcnArchName", "").partition(":")[0]
        return replace(known, gfx=gfx, compiler=triton_missing())
    sm = 10 * properties.major + properties.minor
    trial, full = try_compiler(index), None
    if trial.out_of_memory:
        full = replace(driver_memory(known.name), holders=tuple(gpu_holders(known.name)))
    return replace(known, sm=sm, compiler=trial.problem, full=full)


def gpu_memory(name: str) -> GpuMemory:
    """Return the memory of a GPU and what is free of it now, without who holds the rest."""
    try:
        return GpuMemory(*torch.cuda.mem_get_info(torch_name(name)))
    except RuntimeError as error:
        if is_out_of_memory(error):  # CUDA itself had no room to start
            return driver_memory(name)
        told = str(error).partition("\n")[0].rstrip(".")
        raise DeviceError(f"{name} does not start: {told}.", hint="See headroom doctor.") from error
