"""Kernels in Triton: for GPUs of any maker that it compiles for."""
