"""Context management: rules that keep the conversation short which a policy sees, exact in tokens."""

from headway.config.context import ContextRule, DropOld, KeepLast, Summarize, TokenBudget

__all__ = ["ContextRule", "DropOld", "KeepLast", "Summarize", "TokenBudget"]
