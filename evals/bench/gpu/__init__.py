"""Checks the kernels on a GPU, and measures how far they are from the hardware's limits. Needs torch, NumPy
and Triton."""
