"""Checkpoints with random weights: real shapes, types, settings and tokenizers, for tests and speed."""
