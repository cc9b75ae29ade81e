"""OpenAI's own client against the server: chat, streaming, tools, stop strings, logprobs."""

import math

import openai
import pytest
from engine_serving import GREETING, WEATHER, LiveServer

ASK = [{"role": "user", "content": "Greet me"}]
ASK_WEATHER = [{"role": "user", "content": "Is it raining?"}]


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="policy", messages=ASK, temperature=0)
    assert reply.choices[0].message.content == GREETING
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens > len(GREETING.split())


def test_the_model_answers_to_its_folder_name_too(client: openai.OpenAI, server: LiveServer) -> None:
    name = server.folder.name
    reply = client.chat.completions.create(model=name, messages=ASK, temperature=0, max_tokens=3)
    assert (reply.choices[0].finish_reason, reply.model) == ("length", name)
    streamed = client.chat.completions.create(model=name, messages=ASK, max_tokens=3, stream=True)
    assert {chunk.model for chunk in streamed} == {name}
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name
    assert client.completions.create(model="policy", prompt="a", max_tokens=1).model == "policy"
    assert client.models.retrieve(name).id == name
    assert [card.id for card in client.models.list()][:2] == ["policy", name]
    for asking in (
        lambda: client.chat.completions.create(model="gpt-nothing", messages=ASK),
        lambda: client.models.retrieve("gpt-nothing"),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            asking()
        assert missing.value.code == "model_not_found" and missing.value.request_id


def test_streaming_adds_up_to_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="policy", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == GREETING
    assert len(chunks) > 5 and chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: openai.OpenAI, stream: bool) -> None:
    fields = {"model": "policy", "messages": ASK_WEATHER, "tools": [WEATHER.to_openai()], "temperature": 0}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", '{"city": "Paris"}')]
    assert calls[0].id


def test_a_call_is_streamed_while_its_arguments_come(client: openai.OpenAI) -> None:
    fields = {"model": "policy", "messages": ASK_WEATHER, "tools": [WEATHER.to_openai()], "temperature": 0}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    pieces = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert pieces[0].function.name == "weather" and pieces[0].id
    assert all(piece.function.name is None and piece.id is None for piece in pieces[1:])
    assert len(pieces) > 3 and "".join(piece.function.arguments for piece in pieces) == '{"city": "Paris"}'


def test_text_is_streamed_although_there_are_tools(client: openai.OpenAI) -> None:
    """A server whose machine is busy joins pieces, so that it is asked more than once."""
    fields = {"model": "policy", "messages": ASK, "tools": [WEATHER.to_openai()], "temperature": 0}
    counts = []
    for _ in range(3):
        pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**fields, stream=True)]
        assert "".join(piece or "" for piece in pieces) == GREETING
        counts.append(sum(map(bool, pieces)))
    assert max(counts) > 10, counts


def test_a_tool_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="policy", messages=ASK_WEATHER, tools=[WEATHER.to_openai()], temperature=0
    )
    message = first.choices[0].message
    assert message.tool_calls
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    messages = [*ASK_WEATHER, message.model_dump(exclude_none=True), answer]
    second = client.chat.completions.create(
        model="policy", messages=messages, tools=[WEATHER.to_openai()], temperature=0, max_tokens=4
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["dear", ["friend.", " there"], ". H"])
def test_stop_strings_cut_the_text(client: openai.OpenAI, stop: str | list[str], stream: bool) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = GREETING[: min(GREETING.find(s) for s in stops)]
    fields = {"model": "policy", "messages": ASK, "temperature": 0, "stop": stop}
    if stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        text, finish = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        text, finish = choice.message.content, choice.finish_reason
    assert (text, finish) == (expected, "stop")


def test_logprobs_and_token_ids(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="policy",
        messages=ASK,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(GREETING)
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert math.exp(choice.logprobs.content[0].logprob) > 0.5
    extra = choice.model_extra or {}
    assert len(extra["token_ids"]) == len(choice.logprobs.content)
    assert (reply.model_extra or {})["prompt_token_ids"]


def test_n_and_seed(client: openai.OpenAI) -> None:
    fields = {"model": "policy", "messages": ASK, "temperature": 2.0, "max_tokens": 24, "n": 3, "seed": 7}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_penalties_and_biases_change_what_is_drawn(client: openai.OpenAI) -> None:
    fields = {"model": "policy", "messages": ASK, "max_tokens": 24, "seed": 3}
    forced = client.chat.completions.create(**fields, logit_bias={str(ord("z")): 100})
    assert forced.choices[0].message.content == "z" * 24
    twice = client.chat.completions.create(**fields, logit_bias={str(ord(c)): 60 for c in "yz"}, presence_penalty=2)
    assert set(twice.choices[0].message.content or "") == {"y", "z"}
    again = client.chat.completions.create(**fields, frequency_penalty=2, temperature=0)
    assert again.choices[0].message.content != GREETING[:24]


def test_completions_stream(client: openai.OpenAI) -> None:
    fields = {"model": "policy", "prompt": "Hello there, dear", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**fields).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert streamed == whole and whole


@pytest.mark.parametrize(
    ("param", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 3), ("logit_bias", {"5": 101}), ("frequency_penalty", -2.5)],
)
def test_completions_refuse_what_they_would_ignore(client: openai.OpenAI, param: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="policy", prompt="Hello", max_tokens=1, **{param: value})
    assert refused.value.param == param


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="policy", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
