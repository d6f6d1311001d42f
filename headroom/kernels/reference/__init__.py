"""Reference kernels in plain torch: they run every case, slowly."""
