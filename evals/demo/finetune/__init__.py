"""Adapters for a real model, SmolLM2-135M-Instruct: their data, their training and their measured worth."""
