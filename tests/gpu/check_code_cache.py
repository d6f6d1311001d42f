"""On a GPU: kernels are compiled once, kept on disk, and found by the next process."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from headroom.kernels.cuda.code_cache import code_folder, kept_bytes
from headroom.kernels.cuda.compile import CODE
from headroom.kernels.cuda.norms import gated_activation
from headroom.kernels.cuda.nvrtc import find_headers, open_nvrtc
from headroom.kernels.cuda.probe import try_kernels
from headroom.units import gib


def child(home: Path) -> None:
    """Compile or find a kernel of every family, and run one of them."""
    CODE.open(home)
    started = time.perf_counter()
    tried = try_kernels(0).items()  # an older GPU does not run all families
    failed = {x: why for x, why in tried if why and not why.startswith("needs sm_")}
    seconds = time.perf_counter() - started
    rows = torch.randn(3, 512, device="cuda")
    out = gated_activation(rows, rows, "silu", torch.empty_like(rows))
    error = (out - torch.nn.functional.silu(rows) * rows).abs().max().item()
    print(f"{seconds:.2f} s, error {error:.1e}, refused: {failed or 'none'}")
    sys.exit(bool(failed) or error > 1e-4)


def main() -> None:
    """Start two processes with one home, then two at the same time with another."""
    nvrtc = open_nvrtc()
    print(f"NVRTC {nvrtc.version}, headers in {[*map(str, find_headers(nvrtc.version))]}")
    command = [sys.executable, "-m", "tests.gpu.check_code_cache"]
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        for start in ("compiled", "found"):
            rc = subprocess.run([*command, first]).returncode
            print(f"{'FAIL' if rc else 'PASS'} {start}: {gib(kept_bytes(Path(first)))} kept")
        for path in code_folder(Path(first)).iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        rc = subprocess.run([*command, first]).returncode
        print(f"{'FAIL' if rc else 'PASS'} damaged code is compiled anew")
        both = [subprocess.Popen([*command, second]) for _ in range(2)]
        codes = [process.wait() for process in both]
        print(f"{'FAIL' if any(codes) else 'PASS'} two processes at the same time")


if __name__ == "__main__":
    child(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
