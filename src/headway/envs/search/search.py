"""Answer questions from documents: search, open, find, and an answer with citations that hold."""

import asyncio
import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message, ToolCall
from headway.envs.base import State, ToolUse, metric, reward, tool
from headway.envs.bundled.problems import Row, Split, demonstration, in_split, opening
from headway.envs.policy import ScriptedPolicy
from headway.envs.search.documents import library_documents
from headway.envs.search.index import MOST_HITS, PASSAGE, Index
from headway.envs.search.questions import make_lookups, make_questions

SYSTEM = (
    "Answer from the documents alone. Every document is about one module of Python's library and has its name. Use the "
    "tools, then call `answer` once, with the names of the documents that your answer rests on."
)


class Search(ToolUse):
    """Questions about classes of the standard library of the Python that runs, of up to `hops` references each.

    `hops = 0` asks which module has a name of `shortest` to `longest` characters. `modules` limits the documents to
    these modules and packages. A search gives `hits` documents, with passages of `passage` words.
    `describe_tools = false` keeps the list of tools out of the prompt.
    """

    max_turns = 24
    max_output = 6000

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        hops: int = 3,
        modules: Sequence[str] | None = None,
        shortest: int = 1,
        longest: int = 40,
        hits: int = MOST_HITS,
        passage: int = PASSAGE,
        turns: int = 24,
        split: Split = "train",
        seed: int = 0,
        system: str | None = SYSTEM,
        describe_tools: bool = True,
    ) -> None:
        if split not in ("train", "eval"):
            raise UsageError(f'search: split must be "train" or "eval" (got "{split}")')
        if hops < 0 or hits < 1 or not 0 <= passage <= 64 or turns < 1:
            raise UsageError("search: hops must be at least 0, hits and turns at least 1, passage from 0 to 64")
        self._documents = library_documents(modules)
        made = make_questions(self._documents, hops) if hops else make_lookups(self._documents, shortest, longest)
        questions = [q for q in made if in_split(q.start, split)]
        if not questions:
            lacking = "no class in these modules derives from one of another" if hops else "these modules have no names"
            raise UsageError(f"search: {lacking}; name more of them")
        random.Random(seed).shuffle(questions)
        self._questions = questions[:num_tasks]
        self._index: Index | None = None
        self._hits, self._passage, self._system = hits, passage, system
        self.max_turns, self.describe_tools = turns, describe_tools

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
            self._index = Index(self._documents, self._hits, self._passage)
        return self._index

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, str(task.data["question"]))

    def start(self, state: State) -> None:
        state.opened = set()
        state.answered = None
        state.citations = []

    @tool
    async def search(self, query: str) -> str:
        """Search all documents; gives the names of those that fit best, with a passage of each."""
        return self.index.search(query)

    @tool(name="open")
    async def open_document(self, document: str, state: State, line: int = 1) -> str:
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
    async def answer(self, text: str, state: State, citations: list[str] | None = None) -> str:
        """Give the answer; this ends the task.

        Args:
            text: the answer
            citations: names of the documents that it rests on
        """
        if state.answered is None:
            state.answered, state.citations = text, citations or []
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


def demonstrations(n: int, seed: int = 0, guess_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations about questions without hops, none of the eval split; tasks repeat where there are too few.

    A share of them guesses a module at once; the others search, and answer with the first document that was found.
    `args` are those of the environment.
    """
    given: dict[str, Any] = {"num_tasks": n, **args, "hops": 0, "seed": seed, "split": "train"}
    return asyncio.run(_demonstrate(Search(**given), n, random.Random(seed), guess_share))


async def _demonstrate(environment: Search, n: int, rng: random.Random, guess_share: float) -> list[Row]:
    tasks = environment.tasks()
    modules = sorted({str(task.data["answer"]) for task in tasks})
    tools = [described.to_openai() for described in environment.toolbox.tools] if environment.describe_tools else []
    rows = []
    for i in range(n):
        guess = rng.choice(modules) if rng.random() < guess_share else None
        task = tasks[i % len(tasks)]
        state = await environment.run(task, ScriptedPolicy(partial(_reply, task.id.partition("+")[0], guess)))
        rows.append({**demonstration(state.messages), "tools": tools})
    await environment.close()
    return rows


def _reply(name: str, guess: str | None, _agent: str, messages: list[Message]) -> Message:
    found = messages[-1].content.splitlines()[0].partition(":")[0] if messages[-1].role == "tool" else guess
    tool, arguments = ("search", {"query": name}) if found is None else ("answer", {"text": found})
    return Message("assistant", tool_calls=(ToolCall(f"call_{len(messages)}", tool, json.dumps(arguments)),))
