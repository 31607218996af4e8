"""Sessions: conversations that their clients name, so that their keys and values are kept."""
