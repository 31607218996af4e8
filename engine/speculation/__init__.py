"""Guesses at what comes next, several tokens a step, and answers that are the same with them as without."""
