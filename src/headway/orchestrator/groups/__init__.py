"""Groups of episodes, and the rules for them: which task comes next, how many are under way, how old they may be."""
