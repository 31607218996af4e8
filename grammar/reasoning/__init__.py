"""Reasoning as each model family writes it; one small file per family."""
