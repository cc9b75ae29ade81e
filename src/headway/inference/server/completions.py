"""POST /v1/completions: text or token ids in, text out."""

from itertools import accumulate

from aiohttp import web

from headway.core.openai.answers import new_id
from headway.core.openai.requests import CompletionRequest, Json
from headway.inference.outputs import Choice, Chunk
from headway.inference.server.choices import ChoiceWriter, answer, stop_strings
from headway.inference.server.context import context_of
from headway.inference.server.requests import check_request, read_prompt_body


async def completions(http: web.Request) -> web.StreamResponse:
    context = context_of(http)
    body, size = await read_prompt_body(http, CompletionRequest, context.engine)
    body.check()
    prompt = body.prompt
    if isinstance(prompt, str):
        text = prompt
        prompt = await context.tokenizing.run(size, lambda: context.renderer.encode(text))
    request = body.generate_request(
        prompt, request_id=new_id("cmpl"), max_tokens=body.max_tokens, logprobs=body.logprobs
    )
    request.model = context.policy_name(body.model)
    check_request(request, context.engine)
    stops = stop_strings(body)
    writers = [TextWriter(index, body, context, stops) for index in range(request.sampling_params.n)]
    return await answer(http, "text_completion", request, writers)


class TextWriter(ChoiceWriter):
    """Writes a choice as plain text."""

    def complete(self, choice: Choice) -> Json:
        self.text.take(choice.token_ids, last=True)
        return {"text": self.text.text, "finish_reason": choice.finish_reason}

    def extend(self, chunk: Chunk, shown: str, finish_reason: str | None) -> Json:
        return {"text": shown, "finish_reason": finish_reason, "logprobs": None}

    def logprobs(self, part: Choice | Chunk) -> Json:
        decode = self.context.renderer.decode
        texts = [decode([token]) for token in part.token_ids]
        offsets = list(accumulate(map(len, texts[:-1]), initial=0)) if texts else []
        tops = [{decode([token]): value for token, value in row} for row in part.top_logprobs]
        return {"tokens": texts, "token_logprobs": part.logprobs, "top_logprobs": tops or None, "text_offset": offsets}
