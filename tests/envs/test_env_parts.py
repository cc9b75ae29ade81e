"""The small parts of the protocol: finding environments, describing tools, checking rewards, messages of authors."""

import asyncio
import sys
import threading
from typing import Any, Literal

import pytest
from pool_environments import Echo, Tools

from headway.base import imports
from headway.base.errors import HeadwayError, UsageError
from headway.core.episodes import Task, Trace
from headway.core.messages import Message, ToolCall, as_messages
from headway.envs.base import SingleTurn, reward
from headway.envs.policy import ScriptedPolicy
from headway.envs.registry import load_environment
from headway.envs.rewards import marked_rewards, metric, score
from headway.envs.threads import abandoned, call_in_thread
from headway.envs.tools import cut, from_function, tool

SOURCE = """
from headway.envs.base import SingleTurn, Task, reward

class Reverse(SingleTurn):
    def __init__(self, words: list[str] = ("abc", "de")):
        self.words = words

    def tasks(self):
        return [Task(word, {"word": word}) for word in self.words]

    def prompt(self, task):
        return f"Reverse {task.data['word']}."

    @reward
    def exact(self, task, answer):
        return answer.strip() == task.data["word"][::-1]
"""


def test_a_single_turn_environment_takes_fifteen_lines(tmp_path):
    file = tmp_path / "reverse.py"
    file.write_text(SOURCE)
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 15
    environment = load_environment(f"{file}:Reverse", {"words": ["xyz"]})

    async def play(answer):
        policy = ScriptedPolicy([answer])
        (task,) = environment.tasks()
        state = await environment.run(task, policy)
        await score(environment.rewards(), task, [policy.trace], state)
        return policy.trace.reward

    assert asyncio.run(play("zyx")) == 1.0
    assert asyncio.run(play("xyz")) == 0.0


def test_environments_are_found_by_import_path_and_file(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert len(load_environment("my_envs:Reverse").tasks()) == 2
    assert len(load_environment("my_envs.py:Reverse", {"words": ["a"]}).tasks()) == 1


def test_names_come_from_bundled_and_installed_environments(monkeypatch):
    class Point:
        name, value = "installed-echo", "pool_environments:Echo"

    monkeypatch.setattr(imports, "entry_points", lambda group: [Point] if group == "headway.environments" else [])
    assert isinstance(load_environment("installed-echo"), Echo)
    with pytest.raises(HeadwayError, match='did you mean "installed-echo"') as caught:
        load_environment("instaled-echo")
    assert "module:Name" in str(caught.value)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("no_such_module:Name", "could not be imported: ModuleNotFoundError"),
        ("nowhere/else.py:Name", "there is no file"),
        ("pool_environments:nothing", "has no class or function nothing"),
        ("pool_environments:Needy", r"takes \(required: int\) and is called with \[\]: missing"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(id, message):
    with pytest.raises(HeadwayError, match=message) as caught:
        load_environment(id)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_parse_is_one_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def f(:\n")
    with pytest.raises(HeadwayError, match="SyntaxError"):
        load_environment(f"{file}:Name")


def test_a_typed_function_becomes_a_schema():
    def search(query: str, limit: int | None = None, kind: Literal["web", "code"] = "web", tags: list[str] = ()) -> str:  # type: ignore[assignment]
        """Search for things.

        On several lines.

        Args:
            query: what to look for
            limit (int): how many at most
        """
        return query

    made = from_function(search).tool
    assert made.description == "Search for things. On several lines."
    assert made.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "description": "how many at most"},
            "kind": {"type": "string", "enum": ["web", "code"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
    }


def test_a_tool_without_types_is_refused_at_once():
    def untyped(query):
        return query

    def odd(query: complex) -> str:
        return ""

    with pytest.raises(UsageError, match="needs a type"):
        from_function(untyped)
    with pytest.raises(UsageError, match="use str, int"):
        from_function(odd)


def test_tools_of_an_environment_see_its_state_and_task():
    environment = Tools()
    assert [tool.name for tool in environment.toolbox.tools] == ["add", "broken", "hanging", "hanging_async", "flood"]
    assert environment.toolbox is environment.toolbox

    async def play() -> Any:
        policy = ScriptedPolicy([Message("assistant", "", (ToolCall("1", "add", '{"a": 1, "b": 2}'),)), "done"])
        return await environment.run(Task("0"), policy)

    state = asyncio.run(play())
    assert state.sums == [3]
    assert state.messages[-2] == Message("tool", "3", tool_call_id="1", name="add")


def test_a_tool_never_takes_the_place_of_an_environments_own_method():
    class Opener(Tools):
        @tool(name="open")
        def open_file(self, path: str) -> str:
            """Open a file."""
            return f"opened {path}"

    class Taken(Tools):
        @tool
        async def open(self, path: str = "") -> str:
            """Open a file."""
            return path

    Opener().check()
    assert Opener().toolbox.tools[-1].name == "open"
    told = asyncio.run(Opener().toolbox.call(ToolCall("1", "open", '{"path": "a"}'), None))
    assert told == Message("tool", "opened a", tool_call_id="1", name="open")
    with pytest.raises(UsageError, match=r"'open' takes the place.*@tool\(name=\"open\"\)"):
        Taken().check()


def test_the_list_of_tools_can_be_kept_from_the_model():
    offered: list[int] = []

    class Watching(ScriptedPolicy):
        async def reply(self, messages, tools, *rest):
            offered.append(len(tools))
            return await super().reply(messages, tools, *rest)

    environment = Tools()
    for environment.describe_tools in (True, False):
        call = Message("assistant", "", (ToolCall("1", "add", '{"a": 1, "b": 2}'),))
        assert asyncio.run(environment.run(Task("0"), Watching([call, "done"]))).sums == [3]
    assert offered == [5, 5, 0, 0]


def test_rewards_take_what_they_name_and_metrics_reward_nothing():
    class Judge(SingleTurn):
        def tasks(self):
            return [Task("0", {"x": 2})]

        def prompt(self, task):
            return "go"

        @reward(weight=0.5)
        async def by_task(self, task, state, messages):
            return task.data["x"] * len(messages) + state

        @metric
        def length(self, answer):
            return len(answer)

    policy = ScriptedPolicy(["four"])
    asyncio.run(policy.chat("go"))
    task = Task("0", {"x": 2})
    asyncio.run(score(Judge().rewards(), task, [policy.trace], 1))
    assert policy.trace.rewards == {"by_task": 5.0}
    assert policy.trace.metrics == {"length": 4.0}
    assert policy.trace.reward == 2.5


def test_an_audit_is_recorded_apart_and_its_failure_costs_no_episode():
    class Audited(Echo):
        @reward(audit=True)
        def checked(self, answer):
            return float(answer)

    for said, recorded, notes in (("3", {"audit/checked": 3.0}, []), ("three", {}, ["audit/checked"])):
        policy = ScriptedPolicy([said])
        asyncio.run(policy.chat("say it"))
        asyncio.run(score(Audited().rewards(), Task("0", {"word": said}), [policy.trace], None))
        assert policy.trace.metrics == recorded and list(policy.trace.notes) == notes
        assert policy.trace.reward == 1.0 and policy.trace.rewards == {"same": 1.0}


def test_a_reward_that_asks_for_the_unknown_is_refused_before_any_episode():
    class Wrong(Echo):
        @reward
        def odd(self, weather):
            return 1.0

    with pytest.raises(UsageError, match="unknown parameter 'weather'"):
        marked_rewards(Wrong())


def test_authors_may_write_text_dicts_and_messages():
    assert as_messages("hi") == [Message("user", "hi")]
    parts = [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert as_messages(parts) == [Message("system", "ab")]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"}
    assert as_messages(said) == [Message("assistant", "", (ToolCall("1", "f", "{}"),), reasoning="r")]
    for wrong in ([3], [{"content": "no role"}], [{"role": "king", "content": ""}], [{"role": "user", "content": 3}]):
        with pytest.raises(ValueError, match="message"):
            as_messages(wrong)


def test_long_outputs_lose_their_middle():
    assert cut("abc", 3) == "abc"
    assert cut("a" * 50 + "b" * 50, 20) == "a" * 10 + "\n[80 characters left out]\n" + "b" * 10


def test_threads_come_back_and_hung_ones_are_counted():
    async def main():
        release = threading.Event()
        before = abandoned()
        with pytest.raises(TimeoutError):
            await call_in_thread(release.wait, 0.05)
        assert abandoned() == before + 1
        assert await call_in_thread(lambda: 7) == 7
        release.set()
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if abandoned() == before:
                break
        assert abandoned() == before
        with pytest.raises(RuntimeError, match="SystemExit"):
            await call_in_thread(lambda: sys.exit(1))

    asyncio.run(main())


def test_a_scripted_policy_knows_several_agents():
    policy = ScriptedPolicy(lambda agent, messages: f"{agent}: {messages[-1].content}")
    asyncio.run(policy.agent("second").chat("hi"))
    assert [agent.trace.agent for agent in policy.agents()] == ["second"]
    assert policy.agent("second").trace.nodes[-1].message == Message("assistant", "second: hi")
    assert isinstance(policy.trace, Trace)
