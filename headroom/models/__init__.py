"""One small file per model family."""
