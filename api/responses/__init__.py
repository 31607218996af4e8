"""`POST /v1/responses`: OpenAI's newer form of a conversation, on chat's way through the engine."""
