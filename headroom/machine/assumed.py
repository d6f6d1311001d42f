"""Speeds assumed for devices about which nothing else is known, until they are measured.

`headroom calibrate` measures a machine, and `machine/catalogue.py` lists what makers publish. What
neither knows has the speeds below; all predictions made from them are estimates. The cost model
(`plan/cost_model.py`) owns what kernels reach of these speeds.
"""

# CPUs. Two channels of DDR4-3200 move 51.2 GB/s by the standard; 80 % of it, rounded down.
ASSUMED_CPU_BANDWIDTH = 40e9  # bytes/s
# One core with 256-bit vectors and two units that multiply and add reaches 96 GFLOP/s in f32 at 3
# GHz; about half of it.
ASSUMED_CORE_FLOPS = 50e9  # operations/s

# GPUs: a middle-class card. The catalogue has 360 GB/s and 25.5 TFLOP/s for rtx3060-12gb, 448 GB/s
# and 32.4 TFLOP/s for rtx3060ti-8gb; PCIe 4 with 16 lanes moves 32 GB/s in one direction.
ASSUMED_GPU_BANDWIDTH = 400e9  # bytes/s
ASSUMED_GPU_LINK = 32e9  # bytes/s
ASSUMED_GPU_FLOPS = 30e12  # operations/s
