"""Settings that make no sense are refused when they are read, with the reason."""

import pytest

from headway.base.errors import UsageError
from headway.config.loader import load_settings
from headway.config.orchestrator import OrchestrateSettings

ENV = ["--orchestrator.envs", '[{id = "reverse-text"}]']


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--orchestrator.group_size", "1"], "group"),
        (["--orchestrator.algorithm", '{type = "rloo"}', "--orchestrator.group_size", "1"], "group"),
        (["--orchestrator.algorithm", '{type = "opd"}'], "teacher"),
        (["--orchestrator.algorithm", '{type = "sft"}'], "teacher"),
        (
            [
                *("--orchestrator.algorithm", '{type = "opd", teacher = {base_url = "http://127.0.0.1:8000"}}'),
                *("--orchestrator.engines", '["http://127.0.0.1:8000/"]'),
            ],
            "live policy",
        ),
        (["--orchestrator.algorithm", '{type = "grpoo"}'], "grpo"),
        (["--orchestrator.algorithm", '{type = "custom"}'], "path"),
        (["--orchestrator.algorithm", '{type = "advantage", path = "a:b"}', "--orchestrator.group_size", "1"], "group"),
        (
            [
                *("--orchestrator.kl.reference.base_url", "http://127.0.0.1:8000"),
                *("--orchestrator.engines", '["http://localhost:8000"]'),
            ],
            "live policy",
        ),
        (
            [
                *("--orchestrator.algorithm", '{type = "opsd"}'),
                *("--orchestrator.kl.reference.base_url", "http://127.0.0.1:8000"),
            ],
            "teacher of its own",
        ),
        (["--orchestrator.algorithm", '{type = "rae", decay = 1.5}'], "decay"),
    ],
)
def test_nonsense_is_refused(argv: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_settings(OrchestrateSettings, [*ENV, *argv])


@pytest.mark.parametrize("algorithm", ['{type = "rae"}', '{type = "sft", teacher = {base_url = "http://t:1"}}'])
def test_algorithms_that_compare_nothing_take_groups_of_one(algorithm: str) -> None:
    argv = [*ENV, "--orchestrator.algorithm", algorithm, "--orchestrator.group_size", "1"]
    assert load_settings(OrchestrateSettings, argv).settings.orchestrator.group_size == 1
