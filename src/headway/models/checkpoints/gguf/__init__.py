"""GGUF files (llama.cpp's format) as checkpoint folders."""
