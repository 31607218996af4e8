"""The kernels on a GPU: are they right, and how far from the floor. Needs torch, NumPy and Triton."""
