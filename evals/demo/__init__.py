"""The bundled demo model: its data, tokenizer, training, measurement and weights."""
