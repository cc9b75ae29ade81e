"""Lets Python import a torchvision whose compiled operators do not load beside this torch.

Its released wheels are built against CUDA's. What processors of images use of it is Python over torch; all that they
miss are the schemas of operators that it gives shapes to when it is imported. Python runs this file at its start where
its folder is on PYTHONPATH.
"""

import sys
from typing import Any


class _OperatorsFirst:
    """Defines the missing schemas before the first import of torchvision."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _OperatorsFirst())
