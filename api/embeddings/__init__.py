"""Texts as vectors, and how relevant one text is to another."""
