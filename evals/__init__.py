"""Programs that drive the server from outside, and measure the engine directly."""
