"""Vectors of texts, and how relevant one text is to another."""
