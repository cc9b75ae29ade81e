"""Gates of adapters: which rows of a pass use which adapter, in the slots of a bank or in blocks of their own."""
