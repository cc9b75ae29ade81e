"""Parts of one's own, from files outside of the package: each by itself, and all of them in one run."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e_runs import EXAMPLES, Run, headway

from headway.algorithms.base import Group, Rollout
from headway.algorithms.registry import make_algorithm
from headway.base.errors import HeadwayError, PermanentError, UsageError
from headway.base.imports import load_object
from headway.config.algorithms import CustomAdvantage, CustomAlgorithm
from headway.config.loader import load_settings
from headway.config.losses import CustomLoss
from headway.config.optimizers import CustomOptimizer, CustomSchedule
from headway.config.orchestrator import CustomCurriculum, CustomSampler
from headway.config.rl import RlSettings
from headway.core.episodes import Episode, Task, Trace
from headway.core.runs import RunPaths
from headway.envs.registry import load_environment
from headway.models.registry import load_family
from headway.models.tiny import resolve_model
from headway.orchestrator.collect.filters import load_filters, load_gates
from headway.orchestrator.groups.curriculum import Curriculum, make_curriculum
from headway.rendering.load import load_renderer
from headway.trainer.losses.base import LossInputs
from headway.trainer.losses.registry import make_loss
from headway.trainer.optimizers.optimizer import PolicyOptimizer
from headway.trainer.optimizers.schedules import rate_at

FILES = EXAMPLES / "bring_your_own"
PAGE = EXAMPLES.parent / "docs" / "bring_your_own.md"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> RlSettings:
    monkeypatch.chdir(EXAMPLES.parent)
    return load_settings(RlSettings, ["@", str(FILES / "run.toml")]).settings


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert set(shown) == {file.name for file in FILES.glob("*.py")}
    for name, text in shown.items():
        assert (FILES / name).read_text().split('"""', 2)[2].strip() == text.strip(), name


def test_an_advantage_and_an_algorithm(settings: RlSettings) -> None:
    one, two = settings.orchestrator.envs
    assert one.algorithm is not None and two.algorithm is not None
    traces = [Trace(reward=reward) for reward in (0.0, 1.0, 50.0, 1.0)]
    group = Group("g", "e", Task("t"), [Rollout(Episode("e", "g", "e", Task("t"), traces=traces), [])])
    ranked = make_algorithm(two.algorithm).advantages(group)
    assert [ranked[trace] for trace in traces] == [-0.75, 0.0, 0.75, 0.0]
    centered = make_algorithm(one.algorithm)
    assert [round(centered.advantages(group)[trace], 4) for trace in traces[:1]] == [0.0]
    other = make_algorithm(one.algorithm)
    other.load(json.loads(json.dumps(centered.save())))
    assert other.save() == centered.save() != {"average": 0.0} and not other.relative


def test_a_loss_an_optimizer_and_a_schedule(settings: RlSettings) -> None:
    zero = torch.zeros(1)
    inputs = LossInputs(zero, zero - 3, zero + 1, zero + 1, zero.long())
    loss, metrics = make_loss(settings.trainer.loss)(inputs)
    assert loss.item() == -2 and metrics["cut"].tolist() == [True]
    assert [rate_at(settings.trainer.schedule, step, 4) for step in (1, 2, 3)] == [1.0, 0.5, 1.0]
    weight = torch.tensor([1.0, 1.0], requires_grad=True)
    weight.grad = torch.tensor([0.3, -5.0])
    optimizer = PolicyOptimizer([("w", weight)], settings.trainer.optim)
    optimizer.step(0.5)
    np.testing.assert_allclose(weight.detach().numpy(), [1 - 5e-6, 1 + 5e-6], rtol=1e-7)
    np.testing.assert_allclose(optimizer.state_tensors()["w.momentum"].numpy(), [0.015, -0.25], rtol=1e-6)


def quiet_checkpoint(model: Path, folder: Path) -> Path:
    """A checkpoint of a family that the package does not know."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "quiet"}))
    return folder


def test_a_renderer_and_a_model_family(settings: RlSettings, tmp_path: Path) -> None:
    from headway.core.messages import Message
    from headway.models.build import build_model
    from headway.models.registry import load_config

    folder = quiet_checkpoint(resolve_model("tiny"), tmp_path / "quiet")
    renderer = load_renderer(folder, settings.model.renderer, f"{FILES / 'my_family.py'}:Quiet")
    assert "Be brief." in renderer.decode(renderer.render([Message("user", "hello")]).token_ids)
    config = load_config(folder)
    assert config.family == "quiet" and build_model(config) is not None


def test_a_curriculum_a_sampler_and_a_filter(settings: RlSettings) -> None:
    from headway.core.samples import Sample

    one, two = settings.orchestrator.envs
    tasks = [Task(str(i), {"text": "x" * 8 * i}) for i in range(6)]
    curriculum = make_curriculum(one.curriculum, tasks, 0)
    assert {curriculum.next() for _ in range(20)} == {0, 1}
    curriculum.report(0, 1.0)
    assert {curriculum.next() for _ in range(20)} == {0, 1, 2}
    sampler = make_curriculum(two.curriculum, tasks, 0)
    drawn = [sampler.next() for _ in range(300)]
    assert drawn.count(0) > 150 and drawn.count(0) > 2 * drawn.count(1) > 0
    keep = load_object(settings.orchestrator.filters.custom[0], "filter")
    silent = Sample.blank(4)
    assert not keep(Rollout(Episode("e", "g", "e", tasks[0]), [silent]))
    silent.sampled[1:] = True
    assert keep(Rollout(Episode("e", "g", "e", tasks[0]), [silent]))


WRONG = """
from headway.algorithms.base import Algorithm, GroupRelative
from headway.trainer.optimizers.rules import ElementwiseRule

class Nothing: pass
class Lazy(Algorithm): pass
class Uncompared(GroupRelative):
    def __init__(self): super().__init__(None)
class Motionless(ElementwiseRule):
    def __init__(self, lr): pass
class Blind:
    def __init__(self, tasks, seed): pass
    def next(self): return 99
    def report(self, index, reward): pass
    def save(self): return {}
    def load(self, state): pass
class Mute:
    def __init__(self, tokenizer): pass
def one(value): return 1
def none(): return None
def text(*values, **args): return "text"
def endless(tasks, seed):
    while True: yield "first"
def short(tasks, seed): yield 0
"""
"""Parts that are wrong in ways that authors are."""

USES: dict[str, Callable[[str], object]] = {
    "environment": lambda path: load_environment(path),
    "advantage": lambda path: make_algorithm(CustomAdvantage(path=path)).advantages(two_rewards()),
    "algorithm": lambda path: make_algorithm(CustomAlgorithm(path=path)),
    "loss": lambda path: make_loss(CustomLoss(path=path))(LossInputs(*[torch.zeros(2)] * 4, torch.zeros(2).long())),
    "filter": lambda path: load_filters([path])[0](two_rewards().rollouts[0]),
    "gate": lambda path: load_gates([path])[0](two_rewards()),
    "curriculum": lambda path: make_curriculum(CustomCurriculum(path=path), [Task("a")], 0).next(),
    "sampler": lambda path: list(islice(drawn(make_curriculum(CustomSampler(path=path), [Task("a")], 0)), 2)),
    "optimizer": lambda path: PolicyOptimizer([("w", torch.ones(1))], CustomOptimizer(path=path, lr=0.1)),
    "schedule": lambda path: rate_at(CustomSchedule(path=path), 1, 2),
    "renderer": lambda path: load_renderer(resolve_model("tiny"), path),
    "family": lambda path: load_family(path),
}
"""Makes a part as a run does, and uses it once."""


def drawn(curriculum: Curriculum) -> Iterator[int]:
    while True:
        yield curriculum.next()


def two_rewards() -> Group:
    traces = [Trace(reward=0.0), Trace(reward=1.0)]
    return Group("g", "e", Task("t"), [Rollout(Episode("e", "g", "e", Task("t"), traces=traces), [])])


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("environment", "Nothing", "is a Nothing, not a headway Environment"),
        ("environment", "one", r"takes \(value\) and is called with \[\]"),
        ("advantage", "none", r"takes \(\) and is called with \['rewards'\]"),
        ("advantage", "one", r"returned 1 for 2 rewards; it must return a list with one finite number for each"),
        ("advantage", "text", r"returned 'text' for 2 rewards"),
        ("algorithm", "Nothing", "is no subclass of headway.algorithms.base.Algorithm"),
        ("algorithm", "Lazy", "Lazy must override advantages or score"),
        ("algorithm", "Uncompared", "Uncompared must override compare"),
        ("loss", "none", r"must be callable as loss\(inputs"),
        ("loss", "one", "returned 1; it must return the loss of each of the 2 tokens"),
        ("filter", "none", r"takes \(\) and is called with \['rollout'\]"),
        ("filter", "one", "returned 1; it must return True or False"),
        ("gate", "text", "returned 'text'; it must return True or False"),
        ("curriculum", "text", "str has no method next, report, save, load"),
        ("curriculum", "Blind", "chose task 99; indices are whole numbers, 0 to 0"),
        ("sampler", "text", "returned a str; it must be a generator"),
        ("sampler", "endless", "chose task 'first'; indices are whole numbers, 0 to 0"),
        ("sampler", "short", "ended after 1 draws; it must yield forever"),
        ("optimizer", "text", "must be a subclass of headway.trainer.optimizers.rules.ElementwiseRule"),
        ("optimizer", "Motionless", r"Motionless must override change\(weight, gradient, state, step\)"),
        ("schedule", "text", "returned 'text' in step 1; it must return a number >= 0"),
        ("schedule", "one", r"takes \(value\) and is called with \['max_steps', 'step'\]"),
        ("renderer", "Mute", "Mute has no stop_token_ids, render, extend, parse, decode, encode"),
        ("family", "Nothing", "is not a subclass of headway.models.family.Family"),
    ],
)
def test_nonsense_is_refused_with_what_to_write_instead(kind: str, name: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    with pytest.raises(HeadwayError, match=message) as caught:
        USES[kind](f"{file}:{name}")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code in (UsageError.exit_code, PermanentError.exit_code)  # not tried again


def test_every_kind_of_the_page_refuses_nonsense() -> None:
    assert len(re.findall("^Entry points:", PAGE.read_text(), re.MULTILINE)) == len(USES) - 1  # gates are with filters


@pytest.mark.slow
def test_all_of_them_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    model = quiet_checkpoint(resolve_model("tiny"), tmp_path / "quiet")
    family = ("--model.path", str(model), "--model.family", f"{FILES / 'my_family.py'}:Quiet")
    headway(
        "rl", "@", str(FILES / "run.toml"), "--run.output_dir", str(tmp_path), "--run.name", "run", *family,
        "--trainer.entropy_coef", "0.001", "--trainer.sequence_mask", "{}",
    )  # fmt: skip
    run = Run(RunPaths(tmp_path / "run"))
    assert run.column("trainer", "lr") == pytest.approx([1e-5, 5e-6])
    assert len(run.column("trainer", "rl/cut")) == 2 and max(run.column("trainer", "mismatch_kl")) < 1e-4
    assert len(run.column("trainer", "loss/entropy")) == 2 and run.column("trainer", "rl/sample_masked") == [0.0, 0.0]
    assert {"reward/one/mean", "reward/two/mean"} <= {name for line in run.metrics("orchestrator") for name in line}
    state = json.loads(sorted((tmp_path / "run" / "exports").iterdir())[-1].joinpath("config.json").read_text())
    assert state["model_type"] == "quiet"
