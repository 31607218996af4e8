"""Whatever waits: messages, mailboxes, supervision. Decides nothing that engine/ could decide."""
