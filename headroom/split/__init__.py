"""Layers over devices."""
