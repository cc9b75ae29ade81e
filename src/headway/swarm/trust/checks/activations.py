"""Proofs of activations against the states of a trusted model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.core.activations import TopStates
from headway.swarm.messages.orders import Contribution, Precision
from headway.swarm.messages.proofs import count_proven, decode_proof
from headway.swarm.trust.checks.base import Evidence
from headway.swarm.trust.rescored import Floats, States


@dataclass(frozen=True, slots=True)
class ActivationBounds:
    """Errors of proven states relative to their size: the mean over states, and the largest; and the least mean share
    of the numbers sent that are among the largest here, too."""

    mean: float
    largest: float
    overlap: float


ACTIVATION_BOUNDS: Mapping[Precision, ActivationBounds] = {
    "float32": ActivationBounds(mean=2e-5, largest=1e-4, overlap=0.95),
    "bfloat16": ActivationBounds(mean=0.03, largest=0.1, overlap=0.85),
}


class Activations:
    """Refuses proofs that the weights do not give: of other, older or quantized weights, of other tokens, or invented.

    It looks where logprobs show nothing: a model that is certain of a token gives it a logprob of 0 with many weights,
    and its states still differ. For contributions of the right form.
    """

    name = "activations"

    def __init__(self, bounds: Mapping[Precision, ActivationBounds] = ACTIVATION_BOUNDS) -> None:
        self._bounds = bounds

    def refuse(self, evidence: Evidence) -> str | None:
        bounds, states_PD = self._bounds[evidence.contribution.precision], evidence.rescored.states_PD
        errors, overlaps = compare(claimed_states(evidence.contribution, states_PD.shape[1]), states_PD)
        mean, largest, overlap = float(errors.mean()), float(errors.max()), float(overlaps.mean())
        if mean <= bounds.mean and largest <= bounds.largest and overlap >= bounds.overlap:
            return None
        return (
            f"hidden states are off by {mean:.3g} of their size in the mean and {largest:.3g} at most; {overlap:.0%} "
            "of the numbers sent are among the largest"
        )


def claimed_states(contribution: Contribution, width: int) -> TopStates:
    """Decode the proofs of a contribution, in the order in which its replies are computed again."""
    pairs = zip(contribution.episodes, contribution.proofs, strict=True)
    return TopStates.join([decode_proof(proof, count_proven(episode.traces[0]), width) for episode, proof in pairs])


def compare(claimed: TopStates, states_PD: States) -> tuple[Floats, Floats]:
    """Return, for each state, the error of the numbers that were sent, relative to their size, and the share of them
    that are among as many of the largest here.

    The trusted side has all numbers, so that those that were sent are compared wherever they are: which of two nearly
    equal ones is sent does not count.
    """
    indices_PK = claimed.indices_PK
    right_PK = np.take_along_axis(states_PD, indices_PK, axis=1).astype(np.float64)
    size_P = np.linalg.norm(right_PK, axis=1)
    errors = np.linalg.norm(claimed.values_PK - right_PK, axis=1) / np.maximum(size_P, np.finfo(np.float32).tiny)
    least_P1 = np.partition(np.abs(states_PD), -indices_PK.shape[1], axis=1)[:, -indices_PK.shape[1], None]
    overlaps: Floats = (np.abs(right_PK) >= least_P1).mean(axis=1)
    return errors, overlaps
