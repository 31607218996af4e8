"""What other servers' entry-point tests check, restated and put to any server."""
