"""How to share devices between the replicas of a model and their ranks, by arithmetic."""
