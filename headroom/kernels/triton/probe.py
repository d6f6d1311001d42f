"""A trial of Triton: whether its smallest kernel compiles and runs on a GPU."""

import torch

from headroom.kernels.triton.launch import MISSING
from headroom.kernels.triton.rows import rms_norm

COLUMNS = 64


def try_triton(device: int) -> str:
    """Run the smallest kernel on a GPU; return why that fails, "" if it works."""
    if MISSING:
        return MISSING
    try:
        with torch.cuda.device(device):
            x = torch.full((2, COLUMNS), 3.0, device="cuda")
            found = rms_norm(x, torch.full((COLUMNS,), 2.0, device="cuda"), 0.0).cpu()
    except Exception as error:  # Triton starts compilers and loaders, which may raise anything
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    wrong = float((found - 2.0).abs().max())
    return "" if wrong < 1e-4 else f"its norm of equal values is wrong by {wrong:.3g}"
