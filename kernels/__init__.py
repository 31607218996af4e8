"""Tensors in, tensors out. reference.py is the truth; each operator has a dispatch file of its own."""
