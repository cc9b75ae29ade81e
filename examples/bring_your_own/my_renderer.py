"""A renderer of one's own: how messages become tokens. Made with the checkpoint's tokenizer."""

from dataclasses import replace

from tokenizers import Tokenizer

from headway.rendering.chatml import STYLES, ChatMLRenderer


class Polite(ChatMLRenderer):
    """ChatML with a system message where the conversation has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, replace(STYLES["chatml"], default_system="Be brief."))
