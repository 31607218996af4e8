"""Strict schemas that no grammar enforces completely: a looser grammar binds the answer, and each token is
accepted only if a completion is known with which the whole answer is valid."""
