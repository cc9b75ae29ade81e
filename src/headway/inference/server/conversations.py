"""Tokens of finished requests, kept for those that continue them: a conversation sends each of its tokens once."""

from collections import OrderedDict
from secrets import token_urlsafe

from headway.core.images import RequestImage
from headway.core.openai.requests import RequestError
from headway.core.protocol import Continued, GenerateRequest

CONTINUES = "continues"
"""The field that a refusal names, by which a client knows to send all tokens."""


class Conversations:
    """Prompts with their replies, by names that only those learn who got the reply. The oldest go first once they hold
    more than `capacity` tokens; a conversation is handed on from request to request, so that each of its tokens is kept
    once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str | None], list[int]] = OrderedDict()
        self._images: dict[tuple[str, str | None], list[RequestImage]] = {}
        """Those of conversations that hold some, without their bytes."""
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def resume(self, request: GenerateRequest) -> int:
        """Put the tokens that `request` continues before its own, and count them. Raises RequestError where they are
        not here."""
        if request.continues is None:
            return 0
        images = self._images.get((request.continues.kept, request.cache_salt), ())
        known = self._take(request.continues, request.cache_salt)
        count = len(known)
        request.images = [image for image in images if image.at < count] + request.images
        known += request.token_ids
        request.token_ids, request.continues = known, None
        return count

    def keep(self, request: GenerateRequest, reply: list[int], capacity: int) -> str | None:
        """Keep prompt and reply and return their name; None where they alone are too many. The request's list of tokens
        becomes ours."""
        tokens = request.token_ids
        if len(tokens) + len(reply) > capacity:
            return None
        tokens += reply
        name = token_urlsafe(16)
        self._kept[name, request.cache_salt] = tokens
        if request.images:
            bare = [RequestImage(image.at, image.tokens, image.digest) for image in request.images]
            self._images[name, request.cache_salt] = bare
        self._tokens += len(tokens)
        while self._tokens > capacity:
            self._drop(next(iter(self._kept)))
        return name

    def _take(self, continued: Continued, salt: str | None) -> list[int]:
        key = continued.kept, salt
        if not 0 < continued.tokens <= len(self._kept.get(key, ())):
            raise RequestError("these tokens are not here any more: send all of them", CONTINUES, 409)
        known = self._drop(key)
        del known[continued.tokens :]
        return known

    def _drop(self, key: tuple[str, str | None]) -> list[int]:
        tokens = self._kept.pop(key)
        self._images.pop(key, None)
        self._tokens -= len(tokens)
        return tokens
