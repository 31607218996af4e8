"""Everything that binds an answer: specs, backends, masks, tool and reasoning formats. Never imports
engine."""
