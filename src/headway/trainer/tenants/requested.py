"""Settings that a tenant sends to a host: only what concerns its adapter, and no code of its own."""

from typing import Any

import msgspec
from pydantic import ValidationError

from headway.base.errors import HeadwayError, UsageError
from headway.config.trainer import TrainSettings

_TRAINER = ("optim", "schedule", "loss", "sequence_mask", "entropy_coef", "max_grad_norm", "max_bad_steps")
_MODEL = ("path", "family", "implementation", "dtype", "compute", "lora")
_TOP = ("seq_len", "max_steps", "seed")


def requested_settings(settings: TrainSettings) -> str:
    """Return what a host needs to know of a run's settings, as JSON. Raises UsageError where it could not follow."""
    trainer = settings.trainer
    refused = {
        "placement.trainer_ranks": settings.placement.trainer_ranks > 1,
        "trainer.checkpoints.remote": trainer.checkpoints.remote is not None,
        "trainer.fake_data": trainer.fake_data is not None,
        **{
            f"trainer.{key}.type custom": getattr(trainer, key).type == "custom"
            for key in ("optim", "schedule", "loss")
        },
    }
    if wrong := [name for name, used in refused.items() if used]:
        raise UsageError(f"a run at a host cannot have {', '.join(wrong)}; leave the default, or train without --host")
    if settings.model.lora is None:
        raise UsageError("a run at a host trains an adapter: add [model.lora] to its settings, or --model.lora.rank 16")
    chosen = settings.model_dump(
        mode="json", include={"model": set(_MODEL), "trainer": set(_TRAINER), **dict.fromkeys(_TOP, True)}
    )
    return msgspec.json.encode(chosen).decode()


def tenant_settings(base: TrainSettings, text: str) -> TrainSettings:
    """Lay a tenant's settings over those of the host. Raises HeadwayError where they are wrong or name code."""
    try:
        sent = msgspec.json.decode(text, type=dict[str, Any])
        own = base.model_dump(mode="json", include=set(TrainSettings.model_fields))
        for section, names in (("model", _MODEL), ("trainer", _TRAINER)):
            own[section] |= {name: value for name, value in dict(sent.get(section, {})).items() if name in names}
        own |= {name: sent[name] for name in _TOP if name in sent}
        own["placement"] |= {"data_ranks": None}
        for key in ("optim", "schedule", "loss"):
            if dict(own["trainer"][key]).get("type") == "custom":
                raise HeadwayError(
                    f"trainer.{key}: code of a tenant's own does not run at a host; choose a built-in one"
                )
        settings = TrainSettings.model_validate(own)
    except (msgspec.DecodeError, TypeError, ValueError, ValidationError) as error:
        raise HeadwayError(f"the settings are wrong: {' '.join(str(error).split())[:500]}") from None
    if settings.seq_len > base.seq_len:
        raise HeadwayError(f"seq_len must be at most {base.seq_len} here (got {settings.seq_len})")
    return settings
