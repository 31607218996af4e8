"""Chat templates: what a template can show, how a conversation is rewritten to that, and the prompt."""
