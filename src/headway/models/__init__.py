"""Model families, the layers they share, and Hugging Face checkpoints in and out."""
