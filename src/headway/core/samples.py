"""Samples: one branch of an episode as token-aligned streams, ready for the loss."""

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Experts = NDArray[np.int16]


class Sample(msgspec.Struct):
    """Streams over the T tokens of one sequence; entry t describes token t given the tokens before it.

    `sampled` marks what the policy sampled and this sample is to train (a prefix shared with an earlier
    branch is False here). `logprobs` and `versions` hold on sampled tokens (0 and -1 elsewhere). The three
    weights say how much a token counts in each loss component. `routed_experts` is (T, layers, k), with -1
    where no choice was recorded.
    """

    token_ids: Ints
    sampled: Flags
    logprobs: Floats
    versions: Ints
    advantages: Floats
    rl_weight: Floats
    ce_weight: Floats
    ref_kl_weight: Floats
    ref_logprobs: Floats
    temperature: float = 1.0
    routed_experts: Experts | None = None
    env: str = ""
    group_id: str = ""
    episode_id: str = ""
    agent: str = "policy"
    policy: str = "policy"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The oldest version among sampled tokens; a very large number where nothing was sampled."""
        versions = self.versions[self.versions >= 0]
        return int(versions.min()) if len(versions) else 2**31 - 1
