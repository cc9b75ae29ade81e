"""The tables of metrics in the documentation name what a trainer records."""

import re
from pathlib import Path

from doc_pages import ROOT

from headway.config.loader import load_settings
from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics
from headway.monitor.runs import create_run
from headway.trainer.rl import train

ELSEWHERE = {"mfu", "publish_seconds", "publish_bytes", "loss/ce", "loss/ref_kl", "ref_kl/masked", "ref_kl/kl"}
ELSEWHERE |= {"loss/entropy", "rl/sample_masked"}
"""Not recorded by a step on a CPU over random tokens: they need a known GPU, engines, or other loss components."""


def test_the_page_of_training_lists_every_metric(tmp_path: Path) -> None:
    flags = "--model.path tiny-moe --placement.device cpu --seq_len 64 --max_steps 1 --trainer.fake_data.mean_len 20"
    settings = load_settings(TrainSettings, [*flags.split(), "--run.output_dir", str(tmp_path)]).settings
    paths: RunPaths = create_run(settings.run, "train")
    train(settings, paths)
    (line,) = read_metrics(paths.metrics / "trainer.jsonl")
    recorded = set(line) - {"step", "time"}

    page = (ROOT / "docs/training.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page[page.index("## Metrics") :], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed - ELSEWHERE == recorded
