"""`POST /v1/messages`: Anthropic's form of a conversation, served as a chat completion."""
