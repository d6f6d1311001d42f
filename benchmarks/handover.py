"""What it costs a captured step to ask the CPU: by a pinned word, and by a host-function node.

    python benchmarks/handover.py [--device cuda:0]

A hand-over by pinned words is a request that the GPU writes to host memory, a worker thread that
sees it, computes next to nothing, and an answer that the GPU waits for: what `headroom calibrate`
measures. A host-function node is CUDA's own way into a step: the driver calls a function that does
nothing; what the CPU then computes, and the data's way to it, would come on top.
"""

import argparse
import ctypes

import torch

from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.driver import check, driver
from headroom.kernels.cuda.measure import handover_seconds

ROUNDS, TRIES = 100, 9


def main() -> None:
    """Measure both, and a step without either."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    device = torch.device(parser.parse_args().device)
    torch.cuda.set_device(device)
    empty = graph_seconds(nodes=False)
    print(f"kernels alone: {empty * 1e6:.2f} us for two of them")
    nodes = graph_seconds(nodes=True) - empty
    print(f"host-function node between them: {nodes * 1e6:.1f} us more")
    words = handover_seconds(str(device))
    print(f"pinned words, with request and answer: {words * 1e6:.1f} us")


def graph_seconds(nodes: bool) -> float:
    """Return the median time of two empty kernels in a captured run of many."""
    kernel = compile_kernel("marker.cu", "headroom_part_step")
    # A function of C that does nothing when it is given nothing: Python's own would cost more.
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)

    def work() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for _ in range(ROUNDS):
            kernel((1,), (32,), ())
            if nodes:
                status = driver().cuLaunchHostFunc(stream, nothing, ctypes.c_void_p(None))
                check(status, "A host function could not be captured")
            kernel((1,), (32,), ())

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(TRIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / ROUNDS)
    return sorted(times)[TRIES // 2]


if __name__ == "__main__":
    main()
