"""The actor runtime: cells, refs, bounded mailboxes, supervision. Knows AnyIO and nothing of Personae."""
