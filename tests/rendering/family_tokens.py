"""A tiny tokenizer that knows the marks of many model families, so that their renderers can be built offline."""

from tokenizers import AddedToken, Tokenizer

from headway.models.tiny_tokenizer import tiny_tokenizer

_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_LLAMA = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
]
_KIMI = [f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle")] + [
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
]
_MINIMAX = ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"]
_DEEPSEEK = [f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")] + [
    f"<｜tool▁{name}｜>"
    for name in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end",
        "output▁begin", "output▁end",
    )
]  # fmt: skip
_DEEPSEEK_V4 = ["｜DSML｜"] + [
    f"<｜{name}｜>" for name in ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
]
_INKLING = [f"<|message_{name}|>" for name in ("user", "model", "system", "tool")] + [
    f"<|content_{name}|>"
    for name in (
        "text", "thinking", "image", "audio_input", "xml", "invoke_tool_json", "invoke_tool_text",
        "model_end_sampling",
    )
] + ["<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"]  # fmt: skip
_LAGUNA = ["〈|EOS|〉", "<assistant>", "</assistant>"]

_GEMMA = ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"] + [
    mark for name in ("tool", "tool_call", "tool_response", "image") for mark in (f"<|{name}>", f"<{name}|>")
] + ["<|image|>"]  # fmt: skip
_HUNYUAN = [f"<｜hy_{name}:opensource｜>" for name in ("begin_of_sentence", "eos", "User", "Assistant")] + [
    "<｜reasoning_mode:opensource｜>", "<tool_sep:opensource>"
] + [
    f"<{slash}{name}:opensource>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
    for slash in ("", "/")
]  # fmt: skip
_KIMI_MEDIA = [f"<|media_{name}|>" for name in ("begin", "content", "pad", "end")]

# All of the package but `default`, which has no bridge, and `gpt-oss`, which downloads its vocabulary.
FAMILIES = [
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "gemma4",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "hy3",
    "inkling",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
]

# Where a user's next question, or a tool's result, is known to be appended after a reply without reasoning.
BRIDGES_USER = ["inkling", "kimi-k2", "laguna-xs.2", "llama-3", "prime-qwen3", "qwen3-vl"]
BRIDGES_TOOL = [*BRIDGES_USER, "qwen3"]


def family_tokenizer() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    groups = (_VISION, _GLM, _ARGUMENTS, _LLAMA, _KIMI, _MINIMAX, _DEEPSEEK, _DEEPSEEK_V4, _INKLING, _LAGUNA)
    groups += (_GEMMA, _HUNYUAN, _KIMI_MEDIA)
    marks = [mark for group in groups for mark in group]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer
