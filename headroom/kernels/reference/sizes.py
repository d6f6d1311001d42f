"""Sizes of the reference kernels' tiles, which the planner counts scratch by; without torch."""

ROW_TILE = 16  # rows that a product multiplies at a time, always so many
UNPACK_VALUES = 4 << 20  # weight values that are unpacked at a time; bounds scratch memory
QUERY_TILE = 8  # rows that attention scores at a time
KEY_BLOCK = 128  # keys that they are scored against at a time
