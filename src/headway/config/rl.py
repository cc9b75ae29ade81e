"""Settings of a whole run: what every process reads, and a section for each."""

from typing import Self

from pydantic import model_validator

from headway.config.algorithms import Opd, Sft
from headway.config.base import broken_rule
from headway.config.control import ControlSettings
from headway.config.cost import CostSettings
from headway.config.deployment import DeploymentSettings
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.orchestrator import LIVE_TEACHER, OrchestrateSettings, OrchestratorSettings
from headway.config.trainer import TrainerSettings, TrainSettings


class RlSettings(TrainSettings, OrchestrateSettings, ServeSettings):
    """Settings of `headway rl`."""

    trainer: TrainerSettings = TrainerSettings()
    """The trainer."""
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    """The orchestrator."""
    inference: InferenceSettings = InferenceSettings()
    """The servers of the policy."""
    control: ControlSettings = ControlSettings()
    """The service by which processes on other hosts join the run."""
    deployment: DeploymentSettings = DeploymentSettings()
    """The machines of the run."""
    cost: CostSettings = CostSettings()
    """Prices of devices and energy."""
    audit: bool = True
    """Look for signs of reward hacking while the run goes on, and warn of what is found (docs/audit.md)."""

    @model_validator(mode="after")
    def _teachers_are_elsewhere(self) -> Self:
        own = f"http://{self.inference.host}:{self.inference.port}"
        if self.orchestrator.kl and self.orchestrator.kl.reference.is_served_by([own]):
            raise broken_rule("orchestrator.kl.reference.base_url", LIVE_TEACHER)
        for setting, algorithm in self.orchestrator.algorithms():
            if isinstance(algorithm, Opd | Sft) and algorithm.teacher and algorithm.teacher.is_served_by([own]):
                raise broken_rule(f"orchestrator.{setting}.teacher.base_url", LIVE_TEACHER)
        return self

    @model_validator(mode="after")
    def _tower_can_be_served(self) -> Self:
        if self.model.vision_tower == "lora":
            raise broken_rule(
                "model.vision_tower", 'must be "frozen" or "trained" here: engines do not serve adapters on a tower'
            )
        return self
