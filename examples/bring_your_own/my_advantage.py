"""Advantages of one's own: the rewards of a group to as many numbers."""


def ranked(rewards: list[float], spread: float = 1.0) -> list[float]:
    """Compare by rank instead of by size: one outlier moves nobody."""
    ranks = [sum(other < reward for other in rewards) + sum(other <= reward for other in rewards) for reward in rewards]
    center = sum(ranks) / len(ranks)
    return [spread * (rank - center) / len(ranks) for rank in ranks]
