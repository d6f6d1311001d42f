"""Drafters: what guesses the next tokens of a sequence, for steps that verify guesses."""
