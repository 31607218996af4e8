"""Models and adapters by their names on the Hugging Face Hub."""
