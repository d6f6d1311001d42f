"""What runs on the GPU, in Triton's language; imported only where triton is installed."""
