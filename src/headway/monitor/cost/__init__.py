"""The cost of a run: energy and money, measured where the machine can, and by whom it was waited for."""
