"""The GPU code in Triton's language; imported only if triton is installed."""
