"""The tokenizer of a server's model: what the server tells of it, compared with the one that a client would use."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.rendering.tokenizer import tokenizer_fingerprint
from headway.transport.inference import EngineError, InferenceClient


class ServedModel(msgspec.Struct):
    """The policy's card in `/v1/models`. Servers other than Headway's leave folder and tokenizer out."""

    id: str
    root: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None


class ServedModels(msgspec.Struct):
    data: list[ServedModel]


async def model_of_servers(urls: Sequence[str], given: Path | None, token: str | None = None) -> Path:
    """Return the folder whose tokenizer all servers use: `given` where it is theirs, else the one they name.

    Raises UsageError on another tokenizer than a server's, and where it is not known.
    """
    for url in urls:
        card = await _card(url, token)
        given = _checked(url, card, given)
    assert given is not None
    return given


def _checked(url: str, card: ServedModel, given: Path | None) -> Path:
    if given is None:
        if card.root is None or not (Path(card.root) / "tokenizer.json").is_file():
            raise UsageError(f"{url} does not say which tokenizer it uses; name its model's folder with --model")
        given = Path(card.root)
    if card.tokenizer is not None and tokenizer_fingerprint(given) != card.tokenizer:
        raise UsageError(f"{url} serves {card.root}, which has another tokenizer than {given}; leave --model out")
    return given


async def _card(url: str, token: str | None) -> ServedModel:
    async with InferenceClient(url, token=token) as client:
        if not await client.health():
            raise HeadwayError(f"no inference server answers at {url}; start one with `headway serve MODEL`")
        try:
            cards = (await client.models(ServedModels)).data
        except EngineError:
            cards = []
    return next((card for card in cards if card.tokenizer is not None), ServedModel(""))
