"""What goes where, decided before anything is loaded; no torch."""
