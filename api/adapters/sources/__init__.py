"""Adapters from elsewhere: the Hugging Face Hub, object stores, and folders of this machine."""
