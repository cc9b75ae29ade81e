"""The shape of a sequence's reply, applied to its logits: penalties, biases, and the tokens that its grammar allows.

Nothing here runs in steps without shaped sequences.
"""

import logging
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from headway.inference.embedded.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


class Shaper:
    """The state of one reply's shape: the tokens that were drawn, as penalties count them, and the grammar's.

    A new one finds it in the tokens that the sequence has, so that it may start anew, or elsewhere. The grammar holds
    until a token of `sequence.stops`, which is possible where it is fulfilled and not before.
    """

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.params
        self._sequence = sequence
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._bias = params.logit_bias
        self._counts: Counter[int] = Counter()
        self._added: Tensor | None = None
        self._matcher = None if sequence.grammar is None else sequence.grammar.deep_copy()
        self._free_until, self._call_token = params.free_until, params.call_token
        self._failed = False
        for token in sequence.tokens[sequence.prompt_len - sequence.begun :]:
            self.accept(token)

    def apply(self, logits_V: Tensor) -> None:
        """Shape the logits of the next token, in place."""
        if self._frequency or self._presence or self._bias:
            if self._added is None:
                self._added = torch.zeros_like(logits_V)
                for token in {*self._bias, *self._counts}:
                    self._added[token] = self._added_to(token)
            logits_V += self._added
        guided = self._matcher is not None and self._free_until is None
        allowed = self._allowed(len(logits_V)) if guided else None
        if allowed is not None:
            logits_V.masked_fill_(torch.from_numpy(~allowed).to(logits_V.device), -torch.inf)
        elif self._matcher is not None or self._failed:
            # Neither reasoning nor a reply that is cut short may look like a whole one.
            logits_V[list(self._sequence.stops)] = -torch.inf

    def accept(self, token: int) -> None:
        """Count a token that was drawn. What comes after the reply's end is dropped by the engine, and may be any."""
        if self._frequency or self._presence:
            self._counts[token] += 1
            if self._added is not None:
                self._added[token] = self._added_to(token)
        if self._matcher is None:
            return
        if token in self._sequence.stops:
            self._matcher = None
        elif self._free_until is not None:
            self._free_until = None if token == self._free_until else self._free_until
        elif token == self._call_token:
            self._matcher = None
        elif not self._matcher.consume_token(token):
            self._give_up(self._matcher.get_error())
        else:
            self._call_token = None  # only what a reply begins with is a call in place of the format

    def _added_to(self, token: int) -> float:
        count = self._counts[token]
        return self._bias.get(token, 0.0) - count * self._frequency - (count > 0) * self._presence

    def _allowed(self, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Mark the tokens with which the grammar can go on; None where the reply ends here."""
        assert self._matcher is not None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(np.bool_)
        if self._matcher.is_accepting():
            # The grammar knows a single token that ends replies.
            allowed[:] &= not self._matcher.is_stopped()
            allowed[list(self._sequence.stops)] = True
        if self._call_token is not None:
            allowed[self._call_token] = True
        if self._matcher.is_error() or not allowed.any():
            self._give_up(self._matcher.get_error() or "no token continues it")
            return None
        return allowed

    def _give_up(self, reason: str) -> None:
        """End the reply with its next token, as one that was cut short: what follows would not match."""
        sequence = self._sequence
        logger.warning("request %s is cut short: its grammar failed: %s", sequence.request_id, reason.split("\n")[0])
        sequence.limit = min(sequence.limit, len(sequence) + sequence.ahead + 1)
        self._matcher, self._failed = None, True
