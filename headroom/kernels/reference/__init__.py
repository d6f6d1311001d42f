"""Plain torch kernels: always right, never fast."""
