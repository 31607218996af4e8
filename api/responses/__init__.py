"""`POST /v1/responses`: OpenAI's newer form of a conversation, served as a chat completion."""
