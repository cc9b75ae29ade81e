"""The replies of one episode in the order they came: with them, another worker goes on where the first one died."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec

from headway.envs.policy import ContextLimit, EpisodeFailure
from headway.envs.tree import Prompt, Reply


class LoggedReply(msgspec.Struct, array_like=True):
    """A reply, the digest of the prompt that it answered, and the seconds it took. Without a reply, the prompt did
    not fit the context."""

    prompt: bytes
    reply: Reply | None
    seconds: float


class Recorded(msgspec.Struct):
    """All replies of an episode that was played elsewhere, and the tokens that a conversation could have there."""

    replies: list[Reply]
    context: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LoggedReply)


class ReplyLog:
    """Hands every new reply to `keep`, and gives back `earlier` ones instead of sampling them again.

    Prompts are compared on the way: an environment that asks something else than it did before is found out. With
    `whole = False`, `keep` gets an empty text for each reply, to be counted.
    """

    def __init__(
        self, earlier: Iterable[bytes] = (), keep: Callable[[bytes], None] | None = None, *, whole: bool = True
    ) -> None:
        self._earlier = deque(earlier)
        self._keep, self._whole = keep, whole
        self._turns = 0
        self._differs = ""

    def replay(self, prompt: Prompt) -> LoggedReply | None:
        """The reply that came to `prompt` earlier; None where a new one is due. Raises EpisodeFailure where the
        environment does not repeat itself, and ContextLimit where it was raised earlier."""
        self.check_repeated()
        if not self._earlier:
            return None
        logged = _decoder.decode(self._earlier.popleft())
        self._turns += 1
        if logged.prompt != _digest(prompt):
            self._differs = f"the prompt of turn {self._turns} differs"
            self.check_repeated()
        if logged.reply is None:
            raise ContextLimit("the conversation no longer fits the context")
        return logged

    def add(self, prompt: Prompt, reply: Reply | None, seconds: float) -> None:
        """Keep a new reply."""
        if self._keep is not None:
            logged = LoggedReply(_digest(prompt), reply, seconds)
            self._keep(_encoder.encode(logged) if self._whole else b"")

    def check_ended(self) -> None:
        """Raise EpisodeFailure where the episode ended before it had asked for all earlier replies."""
        if self._earlier and not self._differs:
            self._differs = f"it ended at turn {self._turns}, with {len(self._earlier)} replies left"
        self.check_repeated()

    def check_repeated(self) -> None:
        """Raise EpisodeFailure where the environment has not repeated itself."""
        if self._differs:
            raise EpisodeFailure(
                "worker",
                f"the worker died, and the environment did not repeat itself: {self._differs}; "
                "set resumable = False if that is its nature",
            )


class RecordedReplies(ReplyLog):
    """Answers an episode with the replies of a record alone: it is played again, and nothing is sampled.

    One that asks for more or fewer ends in an error, except where the conversation has outgrown the context.
    """

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._left, self._context = deque(recorded.replies), recorded.context

    def replay(self, prompt: Prompt) -> LoggedReply:
        if len(prompt.token_ids) >= self._context:
            raise ContextLimit(
                f"the conversation has {len(prompt.token_ids)} tokens; the context holds {self._context}"
            )
        if not self._left:
            raise EpisodeFailure("environment", "the environment asks for more replies than there are")
        return LoggedReply(b"", self._left.popleft(), 0.0)

    def check_ended(self) -> None:
        if self._left:
            raise EpisodeFailure("environment", "the environment asks for fewer replies than there are")


def _digest(prompt: Prompt) -> bytes:
    """Name the prompt by its new tokens and the node that they come after, which earlier replies have fixed."""
    numbers = array("q", (prompt.parent, len(prompt.token_ids)))
    numbers.extend(prompt.rendered.token_ids)
    shown = "".join(image.digest for image in prompt.images).encode()
    return blake2b(numbers.tobytes() + shown, digest_size=16).digest()
