"""The APIs that agents speak: OpenAI's Chat Completions and Responses, Anthropic's Messages."""
