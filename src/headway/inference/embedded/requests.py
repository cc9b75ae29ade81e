"""Requests that the engine works on, and what it tells of them."""

from dataclasses import dataclass

from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.errors import FailedError
from headway.inference.outputs import Choice, Chunk, Result


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request and its sequences, one for each of its `n` choices."""

    request_id: str
    sequences: list[Sequence]
    unfinished: int

    def result(self) -> Result:
        """All that was sampled, once every sequence has finished."""
        choices = []
        for s in self.sequences:
            assert s.finish_reason is not None
            output = s.tokens[s.prompt_len :]
            choices.append(Choice(s.index, output, s.logprobs, s.top_logprobs, s.versions, s.finish_reason, s.experts))
        first = self.sequences[0]
        prompt = [None, *first.prompt_logprobs] if first.wants_prompt_logprobs else None
        return Result(self.request_id, choices, first.cached, prompt)


Event = tuple[ActiveRequest, Chunk | Result | FailedError]


def next_chunk(sequence: Sequence) -> Chunk:
    """Take what was sampled since the last chunk."""
    start = sequence.emitted
    sequence.emitted = sequence.output_len
    return Chunk(
        sequence.index,
        sequence.tokens[sequence.prompt_len + start :],
        sequence.logprobs[start:],
        sequence.top_logprobs[start:],
        list(sequence.versions),
        sequence.finish_reason,
        sequence.experts,
    )
