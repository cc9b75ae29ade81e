"""The record of the code that a run's environments were loaded from."""

from pathlib import Path

import pytest

from headway.base.errors import PermanentError
from headway.core.runs import RunPaths
from headway.envs.packages.versions import CodeVersion
from headway.orchestrator.environment_record import (
    UsedEnvironment,
    accept_changed,
    read_environments,
    record_environments,
)


def used(version: str, sha256: str, id: str = "word-vowels") -> UsedEnvironment:
    return UsedEnvironment("words", id, [CodeVersion("word-vowels", version, sha256 * 64)])


def test_a_run_goes_on_with_the_code_it_began_with(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record_environments(paths, [used("0.1.0", "a")])
    record_environments(paths, [used("0.1.0", "a")])
    assert read_environments(paths).environments == [used("0.1.0", "a")]


@pytest.mark.parametrize("now", [used("0.2.0", "b"), used("0.1.0", "b")])
def test_other_code_is_refused_with_both_versions_named_and_accepted_when_told(
    tmp_path: Path, now: UsedEnvironment
) -> None:
    paths = RunPaths(tmp_path)
    record_environments(paths, [used("0.1.0", "a")])
    with pytest.raises(PermanentError) as refusal:
        record_environments(paths, [now])
    for part in (str(now.code[0]), "word-vowels 0.1.0 (sha256 aaaaaaaaaaaa)", "--accept-changed-envs"):
        assert part in str(refusal.value)
    accept_changed(paths)
    record_environments(paths, [now])
    record = read_environments(paths)
    assert record.environments == [now]
    assert [earlier.environments for earlier in record.replaced] == [[used("0.1.0", "a")]]


def test_another_environment_by_the_settings_is_the_users_own_change(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record_environments(paths, [used("0.1.0", "a")])
    record_environments(paths, [used("0.2.0", "b", id="other")])
    assert len(read_environments(paths).environments) == 2


def test_a_damaged_record_says_how_to_go_on(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.environments.write_text("{")
    with pytest.raises(PermanentError, match="--accept-changed-envs"):
        record_environments(paths, [])
    accept_changed(paths)
    record_environments(paths, [])
