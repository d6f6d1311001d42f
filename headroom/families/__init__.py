"""One file per model family: names, dimensions, parts, refusals, synthesis; no torch."""
