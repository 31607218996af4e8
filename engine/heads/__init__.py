"""Trained heads: small networks that guess the next tokens from the hidden states of the model they were
trained for."""
