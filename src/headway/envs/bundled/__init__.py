"""Environments that come with Headway. Those in this folder run offline and are deterministic given their seeds."""

_HERE = "headway.envs.bundled"
_ADAPTERS = "headway.envs.adapters"

# Paths, not classes: listing the environments must not import them or what they need.
_TABLE = {
    "reverse-text": (f"{_HERE}.reverse_text:ReverseText", "write a word backwards (single turn)"),
    "sort-words": (f"{_HERE}.sort_words:SortWords", "sort words as more and more arrive (several turns)"),
    "calculator": (f"{_HERE}.calculator:Calculator", "arithmetic with a calculator (tool use)"),
    "wordle": (f"{_HERE}.wordle:Wordle", "guess a secret from feedback per letter (several turns)"),
    "kuhn-poker": (f"{_HERE}.kuhn_poker:KuhnPoker", "poker with three cards against oneself (self-play)"),
    "proposer-solver": (
        f"{_HERE}.proposer_solver:ProposerSolver",
        "write arithmetic problems that others solve (several agents)",
    ),
    "code": (f"{_HERE}.code:Code", "repair or write code; tests run it in a sandbox (several turns)"),
    "terminal": (f"{_HERE}.terminal:Terminal", "a task in a shell of a sandbox, checked afterwards (tool use)"),
    "swe": ("headway.envs.swe.swe:Swe", "resolve an issue in a repository; hidden tests judge it (tool use)"),
    "math": (f"{_HERE}.math:Math", "problems whose answers are compared as mathematics (single turn)"),
    "needle": (f"{_HERE}.needle:Needle", "find a fact in a long text (long context)"),
    "grid": (f"{_HERE}.grid:Grid", "count, find and compare shapes in a drawn grid (an image, single turn)"),
    "charts": (
        f"{_HERE}.charts:Charts",
        "read bars and follow lines of a drawn chart (an image, single turn)",
    ),
    "screens": (f"{_HERE}.screens:Screens", "find and click buttons of a drawn window (an image, single turn)"),
    "image-questions": (
        f"{_HERE}.image_questions:ImageQuestions",
        "questions about images of a folder of yours (single turn)",
    ),
    "search": ("headway.envs.search.search:Search", "research in Python's documentation, with citations (tool use)"),
    "browser": ("headway.envs.browser.browser:Browser", "tasks on local web sites in a real Chromium (tool use)"),
    "agent": ("headway.envs.agents.agent:AgentProgram", "a program of yours that speaks OpenAI's chat API"),
    "reasoning-gym": (f"{_ADAPTERS}.reasoning_gym:ReasoningGym", "any family of the reasoning-gym package"),
    "textarena": (f"{_ADAPTERS}.textarena:TextArena", "any game of the textarena package"),
    "verifiers": (f"{_ADAPTERS}.verifiers:Verifiers", "any installed taskset of the verifiers package"),
}

ENVIRONMENTS: dict[str, str] = {name: path for name, (path, _) in _TABLE.items()}
ABOUT: dict[str, str] = {name: about for name, (_, about) in _TABLE.items()}
