"""The Triton kernels themselves. Not type-checked: a kernel's arguments are device values, not Python's."""
