"""CUDA C++ kernels, compiled at run time."""
