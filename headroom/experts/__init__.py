"""Routed experts: statistics, placement, memory, computing, exchanges, telemetry."""
