"""Settings of a host's engines."""

from pathlib import Path

from headway.config.host import HostSettings
from headway.config.inference import ServeSettings
from headway.config.loader import load_settings
from headway.core.runs import RunPaths
from headway.inference.vllm.arguments import arguments
from headway.launch.host import _write_settings
from headway.models.tiny import resolve_model


def test_engines_are_closed_and_have_room_for_every_tenants_adapter(tmp_path: Path) -> None:
    """vLLM makes room when it starts, or never."""
    paths = RunPaths(tmp_path)
    paths.config.mkdir()
    _write_settings(HostSettings.model_validate({"host": {"rank": 24}}), paths)
    serve = load_settings(ServeSettings, ["@", str(paths.config / "inference.toml")]).settings
    assert serve.inference.tenants
    chosen = arguments(serve, resolve_model("tiny"), "cpu", 1 << 30)
    assert chosen["enable_lora"] and chosen["max_lora_rank"] >= 24
