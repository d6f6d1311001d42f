"""Speed of a model on a machine, against what its memory allows."""
