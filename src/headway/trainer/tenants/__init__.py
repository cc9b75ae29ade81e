"""Many LoRA runs on one trainer: tenants over one frozen model."""
