"""A trained head (EAGLE-3) for SmolLM2-135M-Instruct: its texts, its training and its measured worth."""
