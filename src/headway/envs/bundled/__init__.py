"""Environments that come with Headway. Those in this folder run offline and are deterministic given their seeds."""

_HERE = "headway.envs.bundled"
_ADAPTERS = "headway.envs.adapters"

# Paths, not classes: listing the environments must not import them or what they need.
ENVIRONMENTS: dict[str, str] = {
    "reverse-text": f"{_HERE}.reverse_text:ReverseText",
    "sort-words": f"{_HERE}.sort_words:SortWords",
    "calculator": f"{_HERE}.calculator:Calculator",
    "wordle": f"{_HERE}.wordle:Wordle",
    "kuhn-poker": f"{_HERE}.kuhn_poker:KuhnPoker",
    "proposer-solver": f"{_HERE}.proposer_solver:ProposerSolver",
    "needle": f"{_HERE}.needle:Needle",
    "agent": "headway.envs.agents.agent:AgentProgram",
    "reasoning-gym": f"{_ADAPTERS}.reasoning_gym:ReasoningGym",
    "textarena": f"{_ADAPTERS}.textarena:TextArena",
    "verifiers": f"{_ADAPTERS}.verifiers:Verifiers",
}

ABOUT: dict[str, str] = {
    "reverse-text": "write a word backwards (single turn)",
    "sort-words": "sort words as more and more arrive (several turns)",
    "calculator": "arithmetic with a calculator (tool use)",
    "wordle": "guess a secret from feedback per letter (several turns)",
    "kuhn-poker": "poker with three cards against oneself (self-play)",
    "proposer-solver": "write arithmetic problems that others solve (several agents)",
    "needle": "find a fact in a long text (long context)",
    "agent": "a program of yours that speaks OpenAI's chat API",
    "reasoning-gym": "any family of the reasoning-gym package",
    "textarena": "any game of the textarena package",
    "verifiers": "any installed taskset of the verifiers package",
}
