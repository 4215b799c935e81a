"""Weights that are stored coded and unpacked on the device, bit for bit. Standard library only, like all of `loader`."""
