"""Episodes for reading: who said what for which reward, and, on request, every token with its mask."""

from collections.abc import Callable

from headway.core.episodes import Episode, Trace
from headway.core.messages import Message
from headway.envs.rewards import conversation
from headway.envs.samples import trace_samples
from headway.envs.terminal_images import ShowImage, name_image
from headway.rendering.base import Renderer

Paint = Callable[[str, str], str]
"""Colors a text by its kind: "role", "dim", "sampled", "reward", "error"."""

_COLORS = {"role": "\x1b[1m", "dim": "\x1b[2m", "sampled": "\x1b[32m", "reward": "\x1b[36m", "error": "\x1b[31m"}


def painted(kind: str, text: str) -> str:
    return f"{_COLORS[kind]}{text}\x1b[0m"


def plain(kind: str, text: str) -> str:
    return text


_CONTROLS = {code: 0x2400 + code for code in range(32) if code != 10} | {127: 0x2421}


def visible(text: str) -> str:
    """`text` with control characters shown as signs: what a model says must not steer the terminal."""
    return text.translate(_CONTROLS)


def message_text(message: Message, paint: Paint, show_image: ShowImage = name_image) -> str:
    parts = [paint("role", f"{message.role}:")]
    if message.reasoning:
        parts.append(paint("dim", f"<think>{visible(message.reasoning)}</think>"))
    if message.content:
        parts.append(visible(message.content))
    parts += [paint("dim", show_image(image)) for image in message.images]
    parts += [f"→ {visible(call.name)}({visible(call.arguments)})" for call in message.tool_calls]
    return " ".join(parts)


def transcript(
    episode: Episode, paint: Paint, renderer: Renderer | None = None, show_image: ShowImage = name_image
) -> str:
    """The conversations of an episode; with a renderer, also the samples that would be trained."""
    lines: list[str] = []
    for trace in episode.traces:
        lines += [message_text(message, paint, show_image) for message in conversation(trace)]
        if renderer is not None:
            lines += token_lines(trace, renderer, paint)
        lines.append(paint("reward", reward_text(trace)))
        lines.append("")
    if episode.error is not None:
        lines.append(paint("error", f"error ({episode.error.kind}): {episode.error.message}"))
    return "\n".join(lines).rstrip()


def reward_text(trace: Trace) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in (trace.rewards | trace.metrics).items())
    about = f" on {trace.problem}" if trace.problem else ""
    cut = ", truncated" if trace.truncated else ""
    return f"{trace.agent}{about}: reward {trace.reward:.3g}" + (f" ({parts})" if parts else "") + cut


def token_lines(trace: Trace, renderer: Renderer, paint: Paint) -> list[str]:
    """Each sample's tokens. Sampled ones are green, or in [brackets] where there is no color."""
    brackets = paint("sampled", "") == ""
    lines = []
    for number, sample in enumerate(trace_samples(trace)):
        sampled = int(sample.sampled.sum())
        mean = float(sample.logprobs[sample.sampled].mean()) if sampled else 0.0
        head = f"sample {number}: {len(sample.token_ids)} tokens, {sampled} sampled, mean logprob {mean:.3f}"
        lines.append(paint("dim", head))
        text = []
        for token, mine in zip(sample.token_ids.tolist(), sample.sampled.tolist(), strict=True):
            shown = visible(renderer.decode([token])).replace("\n", "⏎\n")
            text.append((f"[{shown}]" if brackets else paint("sampled", shown)) if mine else paint("dim", shown))
        lines.append("".join(text))
    return lines
