"""Training of vision towers: frozen, whole, or by adapters (`model.vision_tower`)."""

from headway.base.errors import UsageError
from headway.models.decoder import DecoderLM
from headway.models.vision.config import TowerTraining
from headway.models.vision.decoder import VisionLM
from headway.models.vision.tower import TowerLinear


def prepare_tower(model: DecoderLM, training: TowerTraining, ranks: int = 1) -> None:
    """Freeze the tower, or let adapters that are added later include it. Call it before adapters are added.

    Raises UsageError where the model has no tower to train, or over several ranks: one without images would have no
    gradients to add to those of the others.
    """
    if not isinstance(model, VisionLM):
        if training != "frozen":
            raise UsageError(
                f'model.vision_tower = "{training}": models of {model.config.family!r} have no vision tower'
            )
        return
    if training != "frozen" and ranks > 1:
        raise UsageError(f'model.vision_tower = "{training}" works with placement.trainer_ranks = 1 alone, so far')
    model.tower.requires_grad_(training == "trained")
    for module in model.tower.modules():
        if isinstance(module, TowerLinear):
            module.adaptable = training == "lora"
