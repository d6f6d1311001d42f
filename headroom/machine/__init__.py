"""What this computer is: devices, drivers, limits, measured speeds, precision policy."""
