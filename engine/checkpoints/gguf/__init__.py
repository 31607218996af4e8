"""Models in GGUF, llama.cpp's single-file format."""
