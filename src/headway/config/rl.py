"""Settings of a whole run: what every process reads, and a section for each."""

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.orchestrator import OrchestrateSettings, OrchestratorSettings
from headway.config.trainer import TrainerSettings, TrainSettings


class RlSettings(TrainSettings, OrchestrateSettings, ServeSettings):
    """Settings of `headway rl`."""

    trainer: TrainerSettings = TrainerSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    inference: InferenceSettings = InferenceSettings()
