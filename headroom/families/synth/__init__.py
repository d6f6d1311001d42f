"""Checkpoints with random weights, real in shapes, types, settings and tokenizers."""
