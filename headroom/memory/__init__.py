"""What fits where, decided before loading."""
