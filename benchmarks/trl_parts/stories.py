"""A task whose replies are as long as they may be. What is learned does not matter, only that replies differ in reward.

Headway is not imported: TRL reads it in an interpreter of its own.
"""

SUBJECTS = ("a river", "a clock", "two brothers", "a lighthouse", "the first winter", "a train", "an old map", "bees")
PROMPTS = [f"Write a long story about {SUBJECTS[n % len(SUBJECTS)]} and the number {n}." for n in range(1024)]


def score(text: str) -> float:
    """Return the share of letters that are an e."""
    return text.count("e") / max(len(text), 1)
