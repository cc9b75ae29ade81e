"""Answer questions from documents: search, open, find, and an answer with citations that hold."""

import random
from collections.abc import Sequence
from typing import Any

from headway.core.episodes import Task
from headway.core.errors import UsageError
from headway.core.messages import Message
from headway.envs.base import State, ToolUse, metric, reward, tool
from headway.envs.bundled.problems import Split, in_split
from headway.envs.search.documents import library_documents
from headway.envs.search.index import Index
from headway.envs.search.questions import make_questions

SYSTEM = (
    "Answer from the documents alone. Every document is about one module of Python's library and has its name. Use the "
    "tools, then call `answer` once, with the names of the documents that your answer rests on."
)


class Search(ToolUse):
    """Questions about classes of the standard library of the Python that runs, of up to `hops` references each.

    `modules` limits the documents to these modules and packages.
    """

    system = SYSTEM
    max_turns = 24
    max_output = 6000

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        hops: int = 3,
        modules: Sequence[str] | None = None,
        split: Split = "train",
        seed: int = 0,
    ) -> None:
        self._documents = library_documents(modules)
        if split not in ("train", "eval"):
            raise UsageError(f'search: split must be "train" or "eval" (got "{split}")')
        questions = [q for q in make_questions(self._documents, hops) if in_split(q.start, split)]
        if not questions:
            raise UsageError("search: no class in these modules derives from one of another; name more of them")
        random.Random(seed).shuffle(questions)
        self._questions = questions[:num_tasks]
        self._index: Index | None = None

    def tasks(self) -> Sequence[Task]:
        return [
            Task(f"{q.start}+{q.hops}", {"question": q.text, "answer": q.answer, "evidence": list(q.evidence)})
            for q in self._questions
        ]

    async def close(self) -> None:
        if self._index is not None:
            self._index.close()

    @property
    def index(self) -> Index:
        """Built at the first use: listing tasks does not need it."""
        if self._index is None:
            self._index = Index(self._documents)
        return self._index

    def prompt(self, task: Task) -> str:
        return str(task.data["question"])

    def start(self, state: State) -> None:
        state.opened = set()
        state.answered = None
        state.citations = []

    @tool
    async def search(self, query: str) -> str:
        """Search all documents; gives the names of those that fit best, with a passage of each."""
        return self.index.search(query)

    @tool
    async def open(self, document: str, state: State, line: int = 1) -> str:
        """Read a document.

        Args:
            document: its name
            line: the line to begin at
        """
        if document not in self.index:
            return _unknown(document)
        state.opened.add(document)
        return self.index.open(document, line)

    @tool
    async def find(self, document: str, text: str, state: State) -> str:
        """Find the lines of a document that hold a text.

        Args:
            document: its name
            text: what to look for; case does not matter
        """
        if document not in self.index:
            return _unknown(document)
        state.opened.add(document)
        return self.index.find(document, text)

    @tool
    async def answer(self, text: str, citations: list[str], state: State) -> str:
        """Give the answer; this ends the task.

        Args:
            text: the answer
            citations: names of the documents that it rests on
        """
        if state.answered is None:
            state.answered, state.citations = text, citations
        return "thank you"

    async def respond(self, state: State, reply: Message) -> Any:
        told = await super().respond(state, reply)
        return None if state.answered is not None else told

    @reward
    def correct(self, task: Task, state: State) -> float:
        return float(_plain(state.answered or "") == _plain(task.data["answer"]))

    @reward(weight=0.5)
    def cited(self, task: Task, state: State) -> float:
        """F1 of the citations: those that hold were opened, and are on the way to the answer."""
        evidence, cited = set(task.data["evidence"]), set(state.citations)
        holding = cited & evidence & state.opened
        return 2 * len(holding) / (len(cited) + len(evidence)) if cited else 0.0

    @metric
    def documents_opened(self, state: State) -> float:
        return float(len(state.opened))


def _plain(text: str) -> str:
    """The answer without what may surround a name."""
    return text.strip().strip("`'\".").removesuffix("()").rpartition(".")[2]


def _unknown(document: str) -> str:
    return f"error: there is no document {document!r}; `search` gives the names of documents"
