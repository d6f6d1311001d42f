"""Tokenizers, chat templates, stop texts, reasoning: from text to tokens and back."""
