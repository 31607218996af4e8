"""Benchmarks. They report speed as a ratio to a peer or a roofline in the same run."""
