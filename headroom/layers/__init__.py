"""The blocks of a model, their caches, and the loader that brings their weights to a device."""
