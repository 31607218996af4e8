"""The reasoning formats of the model families; one small file per family."""
