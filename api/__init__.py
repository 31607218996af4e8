"""HTTP, the command line and the library. This package handles JSON and no tensors."""
