"""Tensors in, tensors out. reference.py is the truth; each operator has its own dispatch file."""
