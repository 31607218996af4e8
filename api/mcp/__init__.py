"""MCP servers as tools: which ones requests may name, and sessions with them."""
