"""The commands of the headroom program."""
