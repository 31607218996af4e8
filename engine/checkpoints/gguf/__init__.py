"""Models in GGUF, llama.cpp's format of one file."""
