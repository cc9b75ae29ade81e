"""`headway eval` against a real server, by tokens and by chat alone."""

import json
from collections.abc import Iterator

import pytest
from e2e_runs import headway, serving


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving("tiny") as address:
        yield address


@pytest.mark.parametrize("api", ["tokens", "chat"])
def test_every_task_is_evaluated(server: str, api: str) -> None:
    options = ("--tasks", "5", "--samples", "2", "--max-tokens", "4", "--api", api, "--json")
    output = headway("eval", "--url", server, "--env", "calculator", *options)
    summary = json.loads(output[output.index("{") :])
    assert summary["eval/calculator/episodes"] == 10
    assert summary["eval/calculator/errors"] == 0
    assert summary["eval/calculator/truncated"] > 0
