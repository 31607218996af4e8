"""Speculative decoding: guesses at several next tokens per step, which never change the answer."""
