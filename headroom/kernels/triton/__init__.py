"""Kernels in Triton, for GPUs of any vendor that it supports."""
