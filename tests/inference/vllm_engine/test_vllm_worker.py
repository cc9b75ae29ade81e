"""What happens inside vLLM's workers, without one."""

import pytest
from torch import nn

from headway.inference.vllm.internals import without_adapter_layers

pytestmark = pytest.mark.vllm


def test_layers_that_add_adapters_are_out_of_the_way_while_weights_are_loaded() -> None:
    from vllm.lora.layers import BaseLayerWithLoRA

    class Adding(BaseLayerWithLoRA):  # type: ignore[misc]  # vLLM is not type-checked
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    plain, inner = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.Sequential(plain, nn.Sequential(Adding(inner)))
    wrapped = ["0.weight", "1.0.base_layer.weight"]
    assert [name for name, _ in model.named_parameters()] == wrapped
    with pytest.raises(RuntimeError, match="half-way"), without_adapter_layers(model):
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == {
            "0.weight": id(plain.weight),
            "1.0.weight": id(inner.weight),
        }
        raise RuntimeError("half-way")
    assert [name for name, _ in model.named_parameters()] == wrapped
    assert isinstance(model[1][0], Adding)  # type: ignore[index]  # a Sequential in a Sequential
