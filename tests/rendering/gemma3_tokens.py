"""A tiny tokenizer with Gemma 3's marks, and a chat template as its own."""

import string

from tokenizers import AddedToken, Tokenizer, decoders, models

SPECIAL = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>"]
SPECIAL += ["<end_of_image>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{%- if message.content is string %}{{ message.content | trim }}{% else %}{% for item in message.content %}
{%- if item.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}
{{- '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""As the released one in how it puts parts of a message together: texts are stripped, images are one token."""


def make_tokenizer() -> Tokenizer:
    """Runs of newlines are one token, as in the released one, so that those around images merge with their
    neighbours."""
    characters = ["\n\n", "\n\n\n", "\n\n\n\n", *string.ascii_letters, *string.digits, *" \n?.,:<>_|"]
    vocabulary = {text: number for number, text in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer
