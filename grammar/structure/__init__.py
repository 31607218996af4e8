"""Answers with parts: free text, reasoning, tool calls, JSON; as plain data, and as a grammar."""
