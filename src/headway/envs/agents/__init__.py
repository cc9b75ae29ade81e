"""Agent programs: run unchanged against an OpenAI endpoint of their own episode."""
