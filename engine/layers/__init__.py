"""The building blocks of a decoder: linear layers, norms, rotary embedding, attention, MLP."""
