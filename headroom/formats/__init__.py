"""Bytes on disk, read and never interpreted."""
