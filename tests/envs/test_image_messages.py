"""Images in conversations: placeholders where they stand, a hash in records, bytes that travel once."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.image_files import ImageFiles
from headway.core.images import ImageUse, content_ids, image_digest
from headway.core.messages import Message, as_messages, image_part
from headway.core.protocol import GenerateRequest
from headway.core.records import without_experts
from headway.envs.bundled.grid import Grid, demonstrations, draw
from headway.envs.engines.engines import Engines
from headway.envs.engines.sampler import EngineSampler
from headway.envs.samples import branch_images, trace_samples
from headway.envs.tree import Prompt, Reply, TraceTree
from headway.models.images.processor import PatchProcessor
from headway.models.tiny import BUILT_IN, IMAGE_PROCESSOR
from headway.models.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer
from headway.models.vision.config import VisionConfig
from headway.rendering.base import Renderer
from headway.rendering.chatml import ChatMLRenderer
from headway.rendering.load import load_renderer
from headway.rendering.vision import VisionRenderer

TURNS = 30


def drawn(number: int, size: tuple[int, int] = (24, 16)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (number, 255 - number, 7)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """That of a checkpoint's config, tokenizer and image processor; weights are not needed."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_tokenizer(folder, vision=True)
    config = BUILT_IN["tiny-vl"]
    assert isinstance(config, VisionConfig)
    from headway.models.registry import config_to_hf

    values = config_to_hf(config) | {"image_token_id": tiny_tokenizer(vision=True).token_to_id("<|image_pad|>")}
    (folder / "config.json").write_text(json.dumps(values))
    processor = IMAGE_PROCESSOR | {"patch_size": config.tower.patch, "merge_size": config.tower.merge}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return load_renderer(folder)


def asked(number: int) -> Message:
    text = {"type": "text", "text": f"turn {number}"}
    return as_messages({"role": "user", "content": [text, image_part(drawn(number)), image_part(drawn(number % 7))]})[0]


def play(renderer: Renderer) -> tuple[TraceTree, list[Prompt]]:
    tree, messages, prompts = TraceTree(renderer), list[Message](), list[Prompt]()
    for number in range(TURNS):
        messages.append(asked(number))
        prompts.append(tree.prompt(messages))
        tokens = [*renderer.encode(f"reply {number}"), renderer.stop_token_ids[0]]
        messages.append(tree.record(prompts[-1], Reply(tokens, [0.0] * len(tokens), [(0, len(tokens))], "stop")))
    return tree, prompts


def test_messages_are_read_and_written_in_the_chat_apis_shape() -> None:
    message = asked(3)
    assert message.content == "turn 3" and [image.at for image in message.images] == [6, 6]
    assert as_messages([message.to_openai()]) == [message]
    bare = message.without_bytes()
    assert [image.digest for image in bare.images] == [image_digest(drawn(3)), image_digest(drawn(3))]
    assert b"PNG" not in msgspec.msgpack.encode(bare) and bare.without_bytes() is bare
    for url in ("http://x/a.png", "file:///etc/passwd", "data:text/plain;base64,AAAA", "data:image/png;base64,?", None):
        with pytest.raises(ValueError, match=r"image|base64"):
            as_messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    with pytest.raises(ValueError, match="assistant"):
        as_messages({"role": "assistant", "content": [image_part(drawn(0))]})


def test_placeholders_stand_where_images_do(renderer: Renderer) -> None:
    assert isinstance(renderer, VisionRenderer)
    rendered = renderer.render([asked(1), Message("assistant", "one"), Message("user", "<|image_pad|>")])
    pad = renderer.encode("<|image_pad|>")[0]
    assert [(image.tokens, image.digest) for image in rendered.images] == [(6, image_digest(drawn(1)))] * 2
    for image in rendered.images:
        before, *run, after = rendered.token_ids[image.at - 1 : image.at + image.tokens + 1]
        assert run == [pad] * 6 and renderer.decode([before, after]) == "<|vision_start|><|vision_end|>"
    # A text may name the token: it is one token of text then, except beside images, where it would be mistaken.
    assert rendered.token_ids.count(pad) == 13
    with pytest.raises(ValueError, match="must not hold"):
        renderer.render([msgspec.structs.replace(asked(1), content="turn 1<|image_pad|>")])
    text = ChatMLRenderer(tiny_tokenizer())
    with pytest.raises(ValueError, match="does not see"):
        TraceTree(text).prompt([asked(1)])


def test_conversations_grow_and_keep_hashes_alone(renderer: Renderer, tmp_path: Path) -> None:
    tree, prompts = play(renderer)
    assert tree.trace.rewrites == 0 and len(tree.trace.branches()) == 1
    last = prompts[-1]
    assert len(last.images) == 2 * TURNS and last.token_ids[:] == [
        token for index in tree.trace.path(len(tree.trace.nodes) - 2) for token in tree.trace.nodes[index].token_ids
    ]
    episode = Episode("e", "g", "env", Task("t"), traces=[tree.trace], images=tree.images)
    record = msgspec.json.encode(without_experts(episode))
    assert len(tree.images) == TURNS and not any(digest.encode() not in record for digest in tree.images)
    assert b"data:image" not in record and b'"images":{' not in record
    files = ImageFiles(tmp_path / "images")
    files.keep(episode.images)
    files.keep(episode.images)
    assert len(list((tmp_path / "images").iterdir())) == TURNS
    (sample,) = trace_samples(tree.trace)
    processor = PatchProcessor.from_hf(IMAGE_PROCESSOR | {"patch_size": 4, "merge_size": 2})
    nodes = [tree.trace.nodes[index] for index in sample.nodes]
    images = branch_images(nodes, lambda digest: processor.process(files.load(digest)))
    assert images is not None and len(images.digests) == TURNS
    images.check(len(sample))
    assert images.uses[:, 0].tolist() == [image.at for image in last.images]
    pad = renderer.encode("<|image_pad|>")[0]
    assert (sample.token_ids[images.uses[:, 0]] == pad).all() and np.count_nonzero(sample.token_ids == pad) == 6 * 60
    with pytest.raises(ValueError, match="names no image"):
        files.load("../../etc/passwd")


@pytest.mark.parametrize("keeps", [True, False])
def test_bytes_are_sent_once_in_a_conversation(keeps: bool, renderer: Renderer) -> None:
    _, prompts = play(renderer)
    sampler = EngineSampler(EpisodeRequest("e", "g", Task("t"), ["http://a"]), Engines(), [])
    sent: list[tuple[str, int]] = []
    for prompt in prompts:
        kept = prompt.kept if keeps else 0
        body = sampler._with_images("http://a", GenerateRequest([]), prompt, kept)
        assert [image.at for image in body.images] == [image.at for image in prompt.images if image.at >= kept]
        sent += [(image.digest, len(image.data)) for image in body.images if image.data]
    assert len(sent) == TURNS == len({digest for digest, _ in sent})
    other = sampler._with_images("http://b", GenerateRequest([]), prompts[-1], 0)
    assert sum(bool(image.data) for image in other.images) == TURNS


def test_names_of_prefixes_tell_images_apart() -> None:
    one, other = (ImageUse(1, 3, image_digest(text)) for text in (b"one", b"other"))
    ids = [5, 9, 9, 9, 5]
    assert content_ids(ids, [one]) != content_ids(ids, [other]) and content_ids(ids, []) == ids
    assert content_ids(ids, [one])[::4] == [5, 5] and max(content_ids(ids, [one])[1:4]) < 0


def test_the_grid_asks_what_it_shows() -> None:
    environment = Grid(num_tasks=60, size=3)
    kinds = set()
    for task in environment.tasks():
        (message,) = environment.prompt(task)
        (image,) = message.images
        assert Image.open(io.BytesIO(image.data)).size == (48, 48)
        assert environment.correct(task, f" {task.data['answer']}\n") == 1 and environment.correct(task, "x") == 0
        kinds.add(message.content.split()[0])
        cells = {(row, column): color for row, column, color, _ in task.data["cells"]}
        if message.content.startswith("How many"):
            color = message.content.split()[2].rstrip("?")
            assert int(task.data["answer"]) == list(cells.values()).count(color)
    assert kinds == {"How", "Where", "More"}
    eval_tasks = {str(task.data) for task in Grid(num_tasks=20, split="eval").tasks()}
    assert not eval_tasks & {str(task.data) for task in Grid(num_tasks=200).tasks()}
    (row,) = demonstrations(1)
    assert row["messages"][0]["content"][0]["type"] == "image_url" and row["messages"][1]["role"] == "assistant"
    assert draw(((0, 0, "red", "circle"),), 2, 16) != draw(((0, 0, "red", "square"),), 2, 16)


def test_grids_of_one_color_ask_for_it_and_demonstrations_may_mistake_it() -> None:
    colors = ["blue", "green", "red"]
    args: dict[str, Any] = {"questions": ["color"], "size": 3, "cell": 8}
    tasks = Grid(num_tasks=20, **args).tasks()
    assert all({cell[2] for cell in task.data["cells"]} == {task.data["answer"]} for task in tasks)
    right, mistaken = (demonstrations(20, wrong_share=share, **args) for share in (0.0, 1.0))
    said = [[row["messages"][-1]["content"] for row in rows] for rows in (right, mistaken)]
    assert said[0] == [task.data["answer"] for task in tasks]
    assert said[1] == [colors[(colors.index(answer) + 1) % 3] for answer in said[0]]
