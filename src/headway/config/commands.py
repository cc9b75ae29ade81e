"""Which settings each command reads."""

from headway.config.base import Settings
from headway.config.inference import ServeSettings
from headway.config.orchestrator import OrchestrateSettings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings
from headway.config.trainer import TrainSettings

COMMAND_SETTINGS: dict[str, type[Settings]] = {
    "rl": RlSettings,
    "sft": SftSettings,
    "train": TrainSettings,
    "orchestrate": OrchestrateSettings,
    "serve": ServeSettings,
}
