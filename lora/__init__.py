"""LoRA adapters: file format, digest, pages in memory, rows in a batch."""
