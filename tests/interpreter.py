"""Lets Triton's kernels run in their interpreter where there is no GPU.

Triton looks at the variable when it is imported, which transformers does. No device but a GPU is
ever given these kernels by the registry: tests call them by name.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
