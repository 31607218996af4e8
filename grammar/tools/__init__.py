"""The tool formats of the model families; one small file per family."""
