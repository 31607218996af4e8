"""The actor runtime: cells, refs, bounded mailboxes, supervision. It knows AnyIO and nothing of Personae."""
