"""Tasks, and the episodes run on them: trees of messages with the tokens that engines saw and sampled."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from headway.core.images import ImageUse
from headway.core.messages import Message, Tool
from headway.core.protocol import RoutedExperts as RoutedExperts
from headway.core.protocol import SamplingParams

MAX_REWARD = 1e6
"""Larger rewards would leave float32 when they are squared and summed: they are their environment's mistake."""


AUDIT = "audit/"
"""Begins the names of metrics that are scores of their own: computed beside the reward, never trained on."""


class Task(msgspec.Struct, frozen=True):
    """One problem of an environment. `id` is stable within it; `data` belongs to the environment."""

    id: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Node(msgspec.Struct, omit_defaults=True):
    """Tokens that a conversation was extended by: one rendered message, a generation prompt, or one sampled reply.

    `logprobs` is None unless the policy sampled these tokens, and then has one entry per token. `versions`
    are (policy version, count) runs that cover the sampled tokens. Concatenating the nodes from a root to a
    leaf gives exactly the tokens that the engine saw. `routed_experts`, on sampled nodes, covers the tokens
    from its `start` up to the end of this node, counted from the root of the branch. `images` are those that its tokens
    are placeholders of, counted from its own first token.
    """

    parent: int
    token_ids: list[int]
    message: Message | None = None
    logprobs: list[float] | None = None
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    finish_reason: str | None = None
    temperature: float = 1.0
    images: list[ImageUse] = msgspec.field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None


class Trace(msgspec.Struct, omit_defaults=True):
    """The messages that one agent of an episode saw and said, and its reward.

    `rewards` are the named parts before weighting, `reward` their weighted sum. `rewrites` counts the times
    a template rewrote history, so that a new branch had to start. `notes` are texts for readers of the
    record: outcomes of tests, a diff. `problem` names what agents are compared
    on when it is not the task itself (a solver's proposed problem). `tools` are those that prompts offered.
    """

    agent: str = "policy"
    nodes: list[Node] = msgspec.field(default_factory=list)
    reward: float = 0.0
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    truncated: bool = False
    rewrites: int = 0
    problem: str | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)

    def offer(self, tools: Iterable[Tool]) -> None:
        """Note tools that the agent could call, each once."""
        self.tools += [tool for tool in tools if tool not in self.tools]

    def branches(self) -> list[list[int]]:
        """Return node indices from root to leaf, one list per leaf, in the order the leaves were added."""
        parents = {node.parent for node in self.nodes}
        return [self.path(leaf) for leaf in range(len(self.nodes)) if leaf not in parents]

    def path(self, node: int) -> list[int]:
        """Return node indices from the root to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def spans(self, nodes: Sequence[int]) -> list[tuple[Node, int, int]]:
        """Return each node of a branch with the tokens `start .. end` that it holds there."""
        ends = list(accumulate(len(self.nodes[index].token_ids) for index in nodes))
        return [(self.nodes[i], start, end) for i, start, end in zip(nodes, [0, *ends], ends, strict=False)]


ErrorKind = Literal["environment", "reward", "tool", "timeout", "worker", "engine", "context", "cancelled"]


class EpisodeError(msgspec.Struct, frozen=True):
    """The reason why an episode has no result. `detail` may hold a traceback; it is recorded, not shown by default."""

    kind: ErrorKind
    message: str
    detail: str = ""


class EpisodeRequest(msgspec.Struct, omit_defaults=True):
    """Everything a worker needs to run one episode. `engines` are base URLs in order of preference.

    `api` says what they speak: the inference protocol, whose tokens can be trained, or only OpenAI's chat.
    """

    episode_id: str
    group_id: str
    task: Task
    engines: list[str]
    policy: str = "policy"
    version: int = 0
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    timeout: float = 600.0
    priority: int = 0
    evaluation: bool = False
    api: Literal["tokens", "chat"] = "tokens"


class Episode(msgspec.Struct, omit_defaults=True):
    """The outcome of one request: traces with rewards, or an error (then traces hold what there was).

    `version` is the policy version that the group was pinned to at dispatch; tokens carry their own.
    `timings` are seconds by name: `total`, `engine` (waiting for the model), `environment`, `reward`. `images` are the
    encoded bytes of its images, by digest, on their way from the worker; records leave them out.
    """

    id: str
    group_id: str
    env: str
    task: Task
    policy: str = "policy"
    version: int = 0
    traces: list[Trace] = msgspec.field(default_factory=list)
    error: EpisodeError | None = None
    evaluation: bool = False
    started_at: float = 0.0
    timings: dict[str, float] = msgspec.field(default_factory=dict)
    images: dict[str, bytes] = msgspec.field(default_factory=dict)

    @property
    def reward(self) -> float:
        """The mean over agents, which is the reward where there is one."""
        return sum(t.reward for t in self.traces) / len(self.traces) if self.traces else 0.0
