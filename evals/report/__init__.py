"""Results as HTML and Markdown."""
