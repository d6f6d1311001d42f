"""Blocks that models are made of."""
