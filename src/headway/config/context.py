"""Settings of context management: how the conversation that a policy sees is kept short."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Settings, broken_rule


class KeepLast(Settings):
    """Tool outputs except the last few are replaced with a short note."""

    type: Literal["keep_last"] = "keep_last"
    outputs: int = Field(default=4, ge=0)
    """Tool outputs that stay."""
    above: int = Field(default=0, ge=0)
    """Rewrite when a prompt has more tokens than this; 0: whenever there is an older output, a branch for each."""


class DropOld(Settings):
    """Turns except the last few are dropped; what the episode began with stays."""

    type: Literal["drop_old"] = "drop_old"
    turns: int = Field(default=8, ge=1)
    """Turns that stay: a reply and what followed it, each."""
    above: int = Field(default=0, ge=0)
    """Rewrite when a prompt has more tokens than this; 0: whenever there is an older turn, a branch for each."""


class TokenBudget(Settings):
    """The oldest turns are dropped until the prompt is short enough; what the episode began with stays."""

    type: Literal["budget"] = "budget"
    tokens: int = Field(default=4096, ge=1)
    """Tokens of a prompt after it was shortened."""
    above: int = Field(default=8192, ge=1)
    """Shorten a prompt that has more tokens than this."""

    @model_validator(mode="after")
    def _shortens(self) -> Self:
        if self.tokens > self.above:
            raise broken_rule("tokens", f"must be at most above, which is {self.above} (got {self.tokens})")
        return self


class Summarize(Settings):
    """The policy itself writes a summary, which takes the place of all turns except the last few."""

    type: Literal["summarize"] = "summarize"
    turns: int = Field(default=1, ge=0)
    """Turns that stay as they are."""
    above: int = Field(default=8192, ge=1)
    """Summarize when a prompt has more tokens than this."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of a summary."""


ContextRule = Annotated[KeepLast | DropOld | TokenBudget | Summarize, Field(discriminator="type")]
