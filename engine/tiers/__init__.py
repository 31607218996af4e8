"""Where pages of the KV cache lie when the device has no room for them."""
