"""Experts, chosen by a router."""
