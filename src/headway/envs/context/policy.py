"""A policy that sees a shortened conversation: environments and agents go on with the whole one."""

from dataclasses import dataclass

from headway.config.context import ContextRule, DropOld, KeepLast, TokenBudget
from headway.core.growing import Growing
from headway.core.messages import Message, Messages, as_messages
from headway.core.shapes import ReplyShape
from headway.envs.context import rules
from headway.envs.policy import ContextLimit, Policy, Tools
from headway.envs.tree import repeats


@dataclass(frozen=True, slots=True)
class Shortened:
    """A conversation, and what the policy was shown in its place."""

    whole: Growing[Message]
    shown: list[Message]


class ManagedPolicy(Policy):
    """Applies `rule` to each conversation before `inner` is asked.

    A conversation that was shortened stays so: later turns extend what was shown. What is shown extends the tokens that
    the engine saw as far as it repeats them, and is a new branch of the trace from there on.
    """

    def __init__(self, inner: Policy, rule: ContextRule) -> None:
        super().__init__(inner.trace)
        self._inner, self._rule = inner, rule
        self._shortened: list[Shortened] = []

    async def chat(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        shape: ReplyShape | None = None,
    ) -> Message:
        whole = as_messages(messages)
        earlier = self._find(whole)
        shown = whole if earlier is None else [*earlier.shown, *whole[len(earlier.whole) :]]
        if self._is_due(shown, tools):
            shorter = await self._shorten(whole, shown, tools)
            if shorter != shown:
                shown = shorter
                self._shortened = [known for known in self._shortened if known is not earlier]
                self._shortened.append(Shortened(Growing(whole), shown))
                self.metric("context_rewrites", self.trace.metrics.get("context_rewrites", 0.0) + 1)
        return await self._inner.chat(shown, tools, max_tokens=max_tokens, temperature=temperature, shape=shape)

    @property
    def images(self) -> dict[str, bytes]:
        return self._inner.images

    def another(self, name: str) -> Policy:
        return ManagedPolicy(self._inner.another(name), self._rule)

    def count_tokens(self, messages: Messages, tools: Tools = ()) -> int:
        return self._inner.count_tokens(messages, tools)

    def _find(self, whole: list[Message]) -> Shortened | None:
        found = [known for known in self._shortened if repeats(whole, known.whole)]
        return max(found, key=lambda known: len(known.whole), default=None)

    def _is_due(self, shown: list[Message], tools: Tools) -> bool:
        above = self._rule.above
        return above == 0 or self.count_tokens(shown, tools) > above

    async def _shorten(self, whole: list[Message], shown: list[Message], tools: Tools) -> list[Message]:
        rule = self._rule
        if isinstance(rule, KeepLast):
            return rules.keep_last(shown, rule.outputs)
        if isinstance(rule, DropOld):
            return rules.drop_old(shown, rule.turns)
        if isinstance(rule, TokenBudget):
            return rules.fit_budget(shown, rule.tokens, lambda messages: self.count_tokens(messages, tools))
        opening, turns = rules.split_turns(whole)
        if len(rules.split_turns(shown)[1]) <= rule.turns or not turns:
            return shown  # a summary would take the place of nothing
        summary = await self._summary(shown, tools, rule.max_tokens)
        if summary is None:
            return rules.drop_old(shown, rule.turns)
        return rules.summarized(opening, shown, rule.turns, summary)

    async def _summary(self, shown: list[Message], tools: Tools, max_tokens: int) -> str | None:
        """Let the policy summarize; None where not even that fits its context. A summary that is cut off does not mark
        the episode as truncated."""
        truncated = self.trace.truncated
        try:
            reply = await self._inner.chat(rules.ask_summary(shown), tools, max_tokens=max_tokens)
        except ContextLimit:
            return None
        finally:
            self.trace.truncated = truncated
        return reply.content
