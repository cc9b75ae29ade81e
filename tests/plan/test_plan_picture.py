"""The picture of a plan shows the plan's numbers: as text, and as widths of its bars."""

from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from headway.config.rl import RlSettings
from headway.launch.memory import engine_shares
from headway.models.configs.config import ModelConfig
from headway.plan.fitting import Measured
from headway.plan.forecast import Forecast
from headway.plan.picture import COLORS, DARK, LIGHT, WIDTH, plan_picture
from headway.plan.planning import Change, Plan, Planned
from headway.trainer.memory.estimate import StepMemory

STYLES = Path(__file__).parents[2] / "src/headway/monitor/dashboard/static/app.css"
MODEL = ModelConfig("qwen3", 1000, 64, 2, 4, 2, 16, 128, rope_theta=1e6, tied=True, max_len=512)
SVG = "{http://www.w3.org/2000/svg}"


def forecast(step: float, training: float, idle: float = 0.25) -> Forecast:
    return Forecast(step, training, 1 - training / step, idle, 2.0, 4.0, 0.0, 100.0, 5000.0, 3.0)


def planned(ranks: int, engines: int, expected: Forecast) -> Planned:
    return Planned(ranks, engines, 2, ranks + 2 * engines, expected, 0.0)


def make(**changed: object) -> Plan:
    own, other = planned(8, 4, forecast(40.0, 10.0)), planned(4, 6, forecast(20.0, 19.99, 0.0))
    plan = Plan(
        device="H200",
        steps=500,
        own=own,
        splits=[own, other],
        fastest=other,
        cheapest=other,
        bottleneck="the engines: twice as fast would make a step 41% shorter",
        memory={
            "trainer": {"weights": 20.0, "activations": 50.0, "head": 0.01, "process": 0.8},
            "engine": {"weights": 40.0, "spare": 40.0, "KV": 48.0},
        },
        usable_gib=128.0,
        changes=[Change("max_lag 0", forecast(80.0, 10.0), 64)],
        currency="USD",
        priced=False,
        episodes={},
        origin="as given",
        assumptions=[],
    )
    return msgspec.structs.replace(plan, **changed)


def drawn(plan: Plan) -> tuple[dict[str, float], list[str]]:
    """Return the widths of a picture's bars by their titles, and its texts."""
    root = ElementTree.fromstring(plan_picture(plan))
    bars = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and rect.get("class") != "track":
            bars[str(title.text)] = float(rect.attrib["width"])
    texts = [str(text.text) for text in root.iter(f"{SVG}text")]
    return bars, texts


def test_memory_is_drawn_to_scale_and_named() -> None:
    bars, texts = drawn(make())
    sizes = {"weights": 20.0, "activations": 50.0, "process": 0.8}
    scale = bars["trainer rank 70.8: weights 20.0"] / 20.0
    for name, size in sizes.items():
        assert bars[f"trainer rank 70.8: {name} {size:.1f}"] == pytest.approx(scale * size, abs=0.01)
        assert f"{name} {size:.1f}" in texts
    assert bars["engine's GPU 128.0: KV 48.0"] == pytest.approx(scale * 48.0, abs=0.01)
    assert "free 57.2" in texts, "what the GPU has left is shown"
    assert not any("head" in text for text in texts), "too small to be listed, as in the text of a plan"
    assert any("128.0" in text for text in texts)


def test_a_step_is_divided_into_work_and_waiting() -> None:
    bars, texts = drawn(make())
    assert {"training 10.00 s", "waits 30.00 s", "sampling 30.00 s", "idle 10.00 s"} <= set(texts)
    assert bars["engines: sampling 30.00 s"] == pytest.approx(3 * bars["trainer: training 10.00 s"], abs=0.1)
    seen = Measured(50.0, 3.0, 12.0, 0.5, 0.5, 2.0)
    bars, texts = drawn(make(measured=seen, error=-0.2))
    assert bars["measured: step 50.00 s"] == pytest.approx(5 * bars["trainer: training 10.00 s"], abs=0.1)


def test_layouts_and_settings_have_a_bar_each_beside_the_plan_s_own() -> None:
    plan = make()
    bars, texts = drawn(plan)
    slow, fast = (bars[f"{name}: {time}"] for name, time in (
        ("8 trainer ranks + 4 engines of 2 GPUs", "40.00 s"), ("4 trainer ranks + 6 engines of 2 GPUs", "20.00 s")
    ))  # fmt: skip
    assert slow == pytest.approx(2 * fast, abs=0.02)
    assert "finishes first, costs least" in texts and "as in the settings" in texts and "(+100%)" in texts
    line = ElementTree.fromstring(plan_picture(plan)).findall(f"{SVG}line")[1]
    change = next(rect for rect in ElementTree.fromstring(plan_picture(plan)).iter(f"{SVG}rect")
                  if "max_lag" in "".join(rect.itertext()))  # fmt: skip
    middle = float(change.attrib["x"]) + float(change.attrib["width"]) / 2
    assert float(line.attrib["x1"]) == pytest.approx(middle, abs=0.02), "the own step ends at half of 80 s"


def test_a_plan_for_a_cpu_has_no_memory_and_nothing_leaves_the_picture() -> None:
    plan = make(memory={}, usable_gib=0.0, device="2 cores & <more>")
    assert not any("GiB" in text for text in drawn(plan)[1])
    for one in (plan, make()):
        for rect in ElementTree.fromstring(plan_picture(one)).iter(f"{SVG}rect"):
            assert float(rect.get("x", 0)) + float(rect.attrib["width"]) <= WIDTH


def test_no_two_parts_of_a_memory_bar_share_a_color() -> None:
    trainer = [field.name.replace("_", " ") for field in fields(StepMemory)] + ["fragments", "updates", "process"]
    engine = [*engine_shares(RlSettings(), MODEL).parts, "KV"]
    for parts in (trainer, engine):
        assert len({COLORS[name] for name in parts}) == len(parts)


def test_both_themes_have_the_dashboard_s_colors() -> None:
    text = STYLES.read_text()
    for colors in (LIGHT, DARK):
        assert [name for name, color in colors.items() if f"--{name}: {color};" not in text] == []
        assert all(color in plan_picture(make()) for color in colors.values())
