"""HTTP, command line and library. It handles JSON and no tensors."""
