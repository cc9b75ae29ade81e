"""Which renderer a checkpoint gets, and the fallback that reads its own chat template."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headway.base.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.models.tiny_tokenizer import CHAT_TEMPLATE, TEMPLATE_MARK, save_tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer
from headway.rendering.load import agrees, load_renderer
from headway.rendering.template import ChatTemplate, TemplateRenderer

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + PLAIN
BRACKETS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|endoftext|>{% endfor %}"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN


DROPS_REASONING = """
{%- set place = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set place.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > place.asked and (loop.last or m.reasoning_content) %}
        {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def checkpoint(folder, template, **config):
    save_tiny_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_our_own_template_is_rendered_natively(tmp_path):
    save_tiny_tokenizer(tmp_path)
    renderer = load_renderer(tmp_path)
    assert isinstance(renderer, ChatMLRenderer)
    assert agrees(renderer, load_renderer(tmp_path, "template"))


def test_chatml_without_a_template_is_a_guess_that_is_said(tmp_path, caplog):
    folder = checkpoint(tmp_path, None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert isinstance(load_renderer(folder), ChatMLRenderer)
    assert "has no chat template; ChatML is used" in caplog.text and "model.renderer" in caplog.text


def test_an_unmarked_template_gets_the_dialect_that_agrees_with_it(tmp_path):
    folder = checkpoint(tmp_path, CHAT_TEMPLATE.replace(TEMPLATE_MARK, ""))
    assert load_renderer(folder).style.name == "chatml"


def test_how_a_family_treats_reasoning_is_found_out_from_its_template(tmp_path):
    assert load_renderer(checkpoint(tmp_path, DROPS_REASONING)).style.reasoning == "drop"
    assert load_renderer(checkpoint(tmp_path, PLAIN)).style.reasoning == "keep"


def test_a_template_without_tools_is_native_and_its_default_system_prompt_is_learned(tmp_path):
    renderer = load_renderer(checkpoint(tmp_path, WITH_DEFAULT))
    assert isinstance(renderer, ChatMLRenderer)
    text = renderer.decode(renderer.render([Message("user", "ask")]).token_ids)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nask<|im_end|>\n"


@pytest.mark.parametrize("template", [BRACKETS, REFUSES_SYSTEM])
def test_a_template_that_nothing_agrees_with_is_used_itself(tmp_path, template):
    assert isinstance(load_renderer(checkpoint(tmp_path, template)), TemplateRenderer)


def test_the_family_of_a_model_type_is_taken_where_it_agrees(tmp_path):
    pytest.importorskip("renderers", reason="an optional extra")
    from headway.rendering.external import ExternalRenderer

    llama = (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "<|eot_id|>{% endfor %}"
    )
    folder = checkpoint(tmp_path, llama, model_type="llama")
    assert isinstance(load_renderer(folder), TemplateRenderer)  # its tokenizer lacks the family's marks
    save_tiny_tokenizer(tmp_path)
    assert isinstance(load_renderer(tmp_path, "prime-qwen3"), ExternalRenderer)


def test_the_fallback_attributes_tokens_to_messages_and_marks_what_is_spoken(tmp_path):
    renderer = load_renderer(checkpoint(tmp_path, PLAIN), "template")
    messages = [Message("user", "ask"), Message("assistant", "answer"), Message("user", "more")]
    rendered = renderer.render(messages, generation_prompt=True)
    parts = [(s.message, renderer.decode(s.token_ids)) for s in rendered.segments]
    assert parts == [
        (0, "<|im_start|>user\nask<|im_end|>\n"),
        (1, "<|im_start|>assistant\nanswer<|im_end|>\n"),
        (2, "<|im_start|>user\nmore<|im_end|>\n"),
        (None, "<|im_start|>assistant\n"),
    ]
    said = [t for s in rendered.segments for t, mine in zip(s.token_ids, s.content, strict=True) if mine]
    assert renderer.decode(said) == "answer<|im_end|>"


def test_the_fallback_extends_only_where_the_text_proves_it(tmp_path):
    renderer = load_renderer(checkpoint(tmp_path, PLAIN), "template")
    history, new = [Message("user", "ask")], [Message("user", "more")]
    prompt = renderer.render(history, generation_prompt=True).token_ids
    reply = [*renderer.encode("answer"), renderer.stop_token_ids[0]]
    said = [*history, Message("assistant", "answer")]
    extension = renderer.extend([*prompt, *reply], new, reply=len(reply), history=said)
    whole = renderer.render([*said, *new], generation_prompt=True).token_ids
    assert [*prompt, *reply, *extension.token_ids] == whole
    assert [s.message for s in extension.segments] == [None, 0, None]
    cut_off = renderer.extend([*prompt, *reply[:-1]], new, reply=len(reply) - 1, history=said)
    assert [*prompt, *reply[:-1], *cut_off.token_ids] == whole
    changed = [*history, Message("assistant", "another answer")]
    assert renderer.extend([*prompt, *reply], new, reply=len(reply), history=changed) is None


def test_the_fallback_starts_anew_where_the_template_trims(tmp_path):
    renderer = load_renderer(checkpoint(tmp_path, BRACKETS))
    prompt = renderer.render([Message("user", "ask")]).token_ids
    reply = [*renderer.encode("[assistant]  answer "), *renderer.stop_token_ids[:1]]
    said = [Message("user", "ask"), Message("assistant", " answer ")]
    assert renderer.extend([*prompt, *reply], [Message("user", "more")], reply=len(reply), history=said) is None


def test_bad_checkpoints_end_in_one_line(tmp_path):
    with pytest.raises(HeadwayError, match=r"no tokenizer\.json"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HeadwayError, match="is not a tokenizer"):
        load_renderer(tmp_path)
    folder = checkpoint(tmp_path, "{% if %}")
    with pytest.raises(HeadwayError, match="can't be read"):
        load_renderer(folder)
    with pytest.raises(HeadwayError, match='renderer "no-such-family"'):
        load_renderer(folder, "no-such-family")


def test_templates_that_use_tools_the_usual_ways(tmp_path):
    source = "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}{{ strftime_now('%Y') | length }}"
    renderer = load_renderer(checkpoint(tmp_path, source), "template")
    text = renderer.decode(renderer.render([Message("user", "ask")], (Tool("look"),)).token_ids)
    assert json.loads(text[:-1])["function"]["name"] == "look"
    assert text.endswith("4")


@pytest.mark.parametrize(("scheme", "proven"), [("first", True), ("always", False)])
def test_a_tokenizer_that_marks_words_is_extended_only_where_its_text_comes_back(scheme, proven):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator(["user: ask more assistant: answer"] * 20, trainer)
    source = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"
    end = tokenizer.token_to_id("</s>")
    renderer = TemplateRenderer(tokenizer, ChatTemplate(source, {}), [end])
    said = [Message("user", "ask"), Message("assistant", "answer")]
    whole = renderer.render([*said, Message("user", "more")]).token_ids
    before = whole[: [place for place, token in enumerate(whole) if token == end][1] + 1]
    extension = renderer.extend(before, [Message("user", "more")], reply=3, history=said)
    assert (extension is not None) == proven
    if extension is not None:
        assert [*before, *extension.token_ids] == whole
