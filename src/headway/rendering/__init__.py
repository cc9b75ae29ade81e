"""Messages to tokens and back: chat templates, tool calls, extending a conversation."""
