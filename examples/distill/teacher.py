"""Makes an untrained model of the tiny one's kind, half as large again: `python teacher.py FOLDER`."""

import sys
from dataclasses import replace
from pathlib import Path

from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import load_config
from headway.models.tiny import resolve_model


def main() -> None:
    out = Path(sys.argv[1])
    tiny = resolve_model("tiny")
    config = replace(load_config(tiny), width=160, mlp_width=384)
    model = build_model(config, seed=0)
    save_checkpoint(model, out, files_from=tiny)
    print(f"{out}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
