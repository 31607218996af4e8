"""Everything that waits: messages, mailboxes, supervision. It decides nothing that `engine/` can decide."""
