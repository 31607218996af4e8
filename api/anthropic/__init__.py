"""`POST /v1/messages`: Anthropic's form of a conversation, on chat's way through the engine."""
