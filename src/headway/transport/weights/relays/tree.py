"""The tree of engines that fetch one version: where each stands, and whom it may fetch from."""

FAN_OUT = 2
"""Engines that fetch from one engine. With two, the way to the last of many is short, and a slow one holds few up."""


def ancestors(place: int) -> list[int]:
    """List the places above `place`, nearest first, in the order in which engines came: place 0 has none, and fetches
    from the trainer. Whoever is above came earlier, so nobody waits in a circle."""
    found = []
    while place > 0:
        place = (place - 1) // FAN_OUT
        found.append(place)
    return found
