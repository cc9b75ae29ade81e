"""Construction of algorithms from their settings, which alone hold the defaults."""

from headway.algorithms.base import Algorithm, Context
from headway.algorithms.custom import FunctionAdvantage, make_custom
from headway.algorithms.echo import Echo
from headway.algorithms.grpo import Grpo
from headway.algorithms.hierarchical_grpo import HierarchicalGrpo
from headway.algorithms.kl_penalty import KlPenalty
from headway.algorithms.max_rl import MaxRl
from headway.algorithms.opd import Opd
from headway.algorithms.opsd import Opsd
from headway.algorithms.rae import Rae
from headway.algorithms.reference import ReferenceModel
from headway.algorithms.reinforce_pp import ReinforcePp
from headway.algorithms.rloo import Rloo
from headway.algorithms.sft import Sft
from headway.base.errors import UsageError
from headway.config import algorithms as settings_of

_NO_CONTEXT = Context()


def make_algorithm(
    settings: settings_of.Algorithm, context: Context = _NO_CONTEXT, kl: settings_of.KlPenalty | None = None
) -> Algorithm:
    """Make an instance, for one environment. Raises UsageError when something it needs is missing."""
    algorithm = _make(settings, context)
    return KlPenalty(algorithm, ReferenceModel(kl.reference), kl.coefficient) if kl else algorithm


def _make(settings: settings_of.Algorithm, context: Context) -> Algorithm:
    match settings:
        case settings_of.Grpo():
            return Grpo(settings.normalize, settings.length_penalty)
        case settings_of.MaxRl():
            return MaxRl(settings.length_penalty)
        case settings_of.Rloo():
            return Rloo(settings.length_penalty)
        case settings_of.ReinforcePp():
            return ReinforcePp("none", None)
        case settings_of.Rae():
            return Rae(settings.decay)
        case settings_of.HierarchicalGrpo():
            return HierarchicalGrpo(settings.normalize, None)
        case settings_of.Opd():
            return Opd(ReferenceModel(_teacher(settings.teacher, "opd")))
        case settings_of.Opsd():
            return _opsd(settings, context)
        case settings_of.Sft():
            return Sft(_teacher(settings.teacher, "sft"))
        case settings_of.Echo():
            return Echo(settings.roles, settings.normalize)
        case settings_of.CustomAdvantage():
            return FunctionAdvantage(settings)
        case settings_of.CustomAlgorithm():
            return make_custom(settings)


def _opsd(settings: settings_of.Opsd, context: Context) -> Opsd:
    if context.renderer is None:
        raise UsageError('algorithm "opsd" needs the renderer of the policy\'s model')
    live = settings_of.ReferenceSettings(base_url="", model=context.policy)
    return Opsd(
        ReferenceModel(live, engines=context.engines, token=context.token), context.renderer, settings.demonstration
    )


def _teacher(teacher: settings_of.ReferenceSettings | None, name: str) -> settings_of.ReferenceSettings:
    if teacher is None:
        raise UsageError(f'algorithm "{name}" needs a teacher; set algorithm.teacher.base_url to its address')
    return teacher
