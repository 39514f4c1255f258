"""Kernels in C++ for the CPU at hand: compiled once, when a model first needs them."""
