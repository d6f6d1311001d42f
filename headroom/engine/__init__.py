"""Requests to tokens."""
