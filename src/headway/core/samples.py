"""Samples: one branch of an episode as token-aligned streams, ready for the loss."""

from typing import Self

import msgspec

from headway.core.images import TokenImages
from headway.core.streams import TokenStreams, blank_streams


class BranchKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of a branch: its episode, the index of its trace there, and the index of its last node in the trace."""

    episode: str = ""
    trace: int = 0
    leaf: int = -1


class Sample(TokenStreams, kw_only=True):
    """One branch: the tokens of the nodes `nodes` of trace `trace` of an episode, sampled at one temperature.
    `images` are those that its tokens have placeholders for; None: there are none."""

    temperature: float = 1.0
    agent: str = "policy"
    episode_id: str = ""
    trace: int = 0
    nodes: list[int] = msgspec.field(default_factory=list)
    images: TokenImages | None = None

    @classmethod
    def blank(cls, size: int) -> Self:
        """A sample of `size` tokens in which nothing is trained."""
        return cls(**blank_streams(cls, size))

    @property
    def key(self) -> BranchKey:
        return BranchKey(self.episode_id, self.trace, self.nodes[-1] if self.nodes else -1)

    @property
    def oldest_version(self) -> int:
        """The oldest version among sampled tokens; a very large number where nothing was sampled."""
        versions = self.versions[self.versions >= 0]
        return int(versions.min()) if len(versions) else 2**31 - 1
