"""Lets Triton's kernels run in their interpreter where there is no GPU.

Triton looks at the variable when it is imported, which transformers does. No device but a GPU is
ever given these kernels by the registry: tests call them by name.
"""

import os

# The interpreter's small products take longest where several threads wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Torch's threads would spin while they wait, on cores that other processes of tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # it brings NumPy, which reads the variable above

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
