"""Tool calling, in the format and by the rules of the Berkeley Function-Calling Leaderboard."""
