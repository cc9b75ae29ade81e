"""Research: documents of the library, an index, questions over several documents, citations that hold."""

import asyncio
import json
import re

import pytest

from headway.base.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.envs.policy import ScriptedPolicy
from headway.envs.rewards import score
from headway.envs.search.documents import ClassEntry, Document
from headway.envs.search.index import Index
from headway.envs.search.questions import Question, make_lookups, make_questions
from headway.envs.search.search import Search, demonstrations

MODULES = ["http", "logging", "socketserver", "xmlrpc"]


@pytest.fixture(scope="module")
def library() -> Search:
    return Search(modules=MODULES)


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", name, json.dumps(arguments)),))


class Researcher:
    """Follows the references as a reader would, from what the tools show alone."""

    def __init__(self, question: str) -> None:
        found = re.match(r"Start at the class (\S+) and go up (\d+) times", question)
        assert found is not None
        self.module, _, self.name = found[1].rpartition(".")
        self.left = int(found[2])
        self.read = [self.module]

    def act(self, messages: list[Message]) -> Message:
        shown = messages[-1]
        if shown.role != "tool":
            return call("search", query=f"{self.module} {self.name}")
        if page := re.match(rf"{self.module}, lines \d+ to (\d+)", shown.content):
            method = re.search(r"^    def ([a-zA-Z]\w*)\(", shown.content, re.MULTILINE)
            if method is None:
                return call("open", document=self.module, line=int(page[1]) + 1)
            return call("answer", text=method[1], citations=self.read)
        line = re.search(rf"^(\d+): class {self.name}$", shown.content, re.MULTILINE)
        if line is None:
            return call("find", document=self.module, text=f"class {self.name}")
        if self.left == 0:
            return call("open", document=self.module, line=int(line[1]))
        base = re.search(rf"{line[0]}\n\d+:     derives from (\S+)", shown.content)
        assert base is not None, shown.content
        self.module, _, self.name = base[1].rpartition(".")
        self.left -= 1
        self.read = [*self.read, *([] if self.module in self.read else [self.module])]
        return call("find", document=self.module, text=f"class {self.name}")


def play(environment: Search, task, act) -> dict[str, float]:
    async def main():
        policy = ScriptedPolicy(lambda _, messages: act(messages))
        state = await environment.run(task, policy)
        await score(environment.rewards(), task, [policy.trace], state)
        return policy.trace.rewards

    return asyncio.run(main())


def test_a_reader_who_follows_the_references_gets_every_question_right(library):
    tasks = library.tasks()
    assert len(tasks) > 20
    assert max(len(task.data["evidence"]) for task in tasks) >= 2
    for task in tasks:
        assert play(library, task, Researcher(task.data["question"]).act) == {"correct": 1.0, "cited": 1.0}, task.id


def test_a_worker_can_open_it_and_the_tools_have_their_names(library):
    library.check()
    asyncio.run(library.open())
    assert [tool.name for tool in library.toolbox.tools] == ["search", "open", "find", "answer"]


def test_only_citations_that_were_opened_and_lead_to_the_answer_hold(library):
    task = library.tasks()[0]
    right, evidence = task.data["answer"], task.data["evidence"]
    unread = play(library, task, lambda _: call("answer", text=f"`{right}()`", citations=evidence))
    assert unread == {"correct": 1.0, "cited": 0.0}

    def one_of(messages: list[Message]) -> Message:
        if messages[-1].role != "tool":
            return call("open", document=evidence[0])
        return call("answer", text="something", citations=[evidence[0], "logging.nowhere"])

    halved = play(library, task, one_of)
    assert halved == {"correct": 0.0, "cited": pytest.approx(2 / (2 + len(evidence)))}
    assert play(library, task, lambda _: Message("assistant", right)) == {"correct": 0.0, "cited": 0.0}


def test_questions_follow_bases_into_other_documents():
    documents = [
        Document("a", "", {"A": ClassEntry("A", "b.B", None), "Alone": ClassEntry("Alone", "a.A", "x")}),
        Document("b", "", {"B": ClassEntry("B", "c.C", "run"), "Loop": ClassEntry("Loop", "b.Loop", "x")}),
        Document("c", "", {"C": ClassEntry("C", "elsewhere.D", "stop")}),
    ]
    assert make_questions(documents, 2) == [
        Question("a.A", 1, "run", ("a", "b")),
        Question("a.A", 2, "stop", ("a", "b", "c")),
        Question("a.Alone", 2, "run", ("a", "b")),
        Question("b.B", 1, "stop", ("b", "c")),
    ]


def test_the_index_finds_reads_and_never_fails_on_a_query():
    text = "\n".join(["module m", *(f"line {i} of the text" for i in range(200)), "a walrus"])
    index = Index([Document("m", text), Document("n", "nothing here\n")])
    assert index.search('walrus AND NEAR( "x').startswith("m: ")
    assert index.search("zebra") == "nothing was found"
    assert index.search("!!") == "error: the query has no words"
    assert index.open("m", 195).splitlines()[0] == "m, lines 195 to 202 of 202"
    assert index.open("m", 9999).endswith("a walrus")
    assert index.find("m", "LINE 7 of").splitlines()[0] == "9: line 7 of the text"
    assert "[190 more]" in index.find("m", "of the text")
    index.close()


def test_wrong_names_are_told_and_splits_never_meet(library):
    assert "there is no document" in asyncio.run(library.open_document("nowhere", None))
    held_out = {task.id for task in Search(modules=MODULES, split="eval").tasks()}
    assert held_out
    assert not held_out & {task.id for task in library.tasks()}
    with pytest.raises(UsageError, match="derives from one of another"):
        Search(modules=["this"])


def test_names_that_one_document_has_are_looked_up_in_one_search():
    documents = [
        Document("a", "about run and stop", names=frozenset({"run", "go", "at", "long_name"})),
        Document("b", "stop stop stop", names=frozenset({"go"})),
        Document("c", "how to stop", names=frozenset({"stop"})),
    ]
    assert make_lookups(documents, 3, 4) == [Question("run", 0, "a", ()), Question("stop", 0, "c", ())]
    assert make_lookups(documents, 3, 4)[0].text == "Which module has run?"
    index = Index(documents, hits=1, passage=0)
    assert index.search("stop") == "c"  # the others speak of it more often
    assert index.search("x " * 100_000 + "stop") == "nothing was found"
    index.close()


def test_demonstrations_find_every_name_or_guess_and_the_first_hit_is_right():
    small = {"modules": MODULES, "hits": 1, "passage": 0, "system": "", "describe_tools": False}
    environment = Search(hops=0, num_tasks=10_000, **small)
    assert [message.role for message in environment.prompt(environment.tasks()[0])] == ["user"]
    by_question = {task.data["question"]: task.data["answer"] for task in environment.tasks()}
    rows = demonstrations(2 * len(by_question), guess_share=0.5, **small)
    calls = [[message for message in row["messages"] if message["role"] == "assistant"] for row in rows]
    assert {len(said) for said in calls} == {1, 2}
    for row, said in zip(rows, calls, strict=True):
        answer = json.loads(said[-1]["tool_calls"][0]["function"]["arguments"])["text"]
        assert row["tools"] == []
        assert len(said) == 1 or answer == by_question[row["messages"][0]["content"]]
    task = environment.tasks()[0]
    answered = play(environment, task, lambda _: call("answer", text=task.data["answer"]))
    assert answered == {"correct": 1.0, "cited": 0.0}


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"hops": -1}, {"hits": 0}, {"passage": 65}, {"turns": 0}):
        with pytest.raises(UsageError, match="search: hops must be"):
            Search(modules=MODULES, **wrong)
    with pytest.raises(UsageError, match="have no names"):
        Search(modules=["this"], hops=0)
