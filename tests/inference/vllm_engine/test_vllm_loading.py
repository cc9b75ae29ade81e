"""Versions that are loaded beside those that serve, and taken back."""

from collections.abc import Iterable, Iterator

import pytest
import torch

from headway.base.errors import HeadwayError
from headway.inference.vllm.updates import aside
from headway.inference.vllm.updates.aside import VersionAside
from headway.inference.vllm.updates.kept import KeptWeights
from headway.inference.vllm.updates.loaded import LoadedProof
from headway.inference.vllm.updates.places import Places


def test_weights_that_were_set_aside_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model[1].bias = model[2].bias  # one tensor under two names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = KeptWeights(model)
    kept.keep(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    kept.restore(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_weights_are_loaded_beside_those_that_are_served() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model[1].bias = model[2].bias  # one tensor under two names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    kept = KeptWeights(model)

    def serves(expected: dict[str, torch.Tensor]) -> bool:
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    with kept.loading(model), torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    assert serves(before)
    kept.exchange(model)
    after = before | {name: torch.full_like(p, number) for number, (name, p) in enumerate(model.named_parameters())}
    assert serves(after | {"2.bias": after["1.bias"]})
    kept.exchange(model)
    assert serves(before)
    with pytest.raises(ValueError, match="half"), kept.loading(model), torch.no_grad():
        next(model.parameters()).zero_()
        raise ValueError("half")
    assert serves(before)


class Loading(torch.nn.Sequential):
    """A model that loads as vLLM's do: each tensor that comes, under its name."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)


def test_a_version_comes_in_parts_between_which_the_old_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "PART_BYTES", 80)
    model = Loading(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    kept = KeptWeights(model)

    def serves(expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    def arriving(*, whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield from new.items()
        if not whole:
            raise HeadwayError("the fingerprint differs")

    version, parts = VersionAside(model, kept, LoadedProof(model, 0), arriving(whole=True)), []
    while not version.whole:
        version.load_part()
        parts.append(version.bytes)
        assert serves(before)
    assert parts == [80, 160, 180] and [name for name, _ in version.came] == list(new)
    version.load_part()  # other ranks may not have ended
    assert version.bytes == 180
    kept.exchange(model)
    assert serves(new)
    version = VersionAside(model, kept, LoadedProof(model, 0), arriving(whole=False))
    with pytest.raises(HeadwayError, match="differs"):
        for _ in range(3):
            version.load_part()
    assert serves(new) and not version.whole


class Fusing(torch.nn.Module):
    """Loads as vLLM's models do: q and k into rows of one parameter, one tensor halved, one in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(5, 2))
        self.part = torch.nn.Parameter(torch.zeros(2, 2))
        self.single = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.twice = torch.nn.Parameter(torch.zeros(2, 2))
        self.loaded: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            match name:
                case "q":
                    self.qk.data[:3].copy_(tensor)
                case "k":
                    self.qk.data[3:].copy_(tensor)
                case "half":
                    self.part.data.copy_(tensor[:2])
                case "single":
                    self.single.data.copy_(tensor)
                case "twice":
                    self.twice.data[:1].copy_(tensor)
                    self.twice.data[1:].copy_(tensor)


def test_later_versions_are_received_where_loaders_would_copy_them() -> None:
    model, places = Fusing(), Places()
    kept = KeptWeights(model)

    def version(number: float, *, whole: bool = True) -> None:
        shapes = {"q": (3, 2), "k": (2, 2), "half": (4, 2), "single": (2,), "twice": (1, 2)}

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for at, (name, shape) in enumerate(shapes.items()):
                tensor = torch.full(shape, float(number + at))
                # As a receiver does.
                yield name, places.known[name].copy_(tensor) if name in places.known else tensor
            if not whole:
                raise HeadwayError("the fingerprint differs")

        model.loaded = []
        coming = VersionAside(model, kept, LoadedProof(model, 0), arriving(), places)
        served = [parameter.clone() for parameter in model.parameters()]
        try:
            coming.load_part()
            assert [name for name, _ in coming.came] == list(shapes) and coming.bytes == 4 * (6 + 4 + 8 + 2 + 2)
        finally:
            assert all(torch.equal(a, b) for a, b in zip(served, model.parameters(), strict=True))

    def serves(number: float) -> None:
        kept.exchange(model)
        assert model.qk[:3].eq(number).all() and model.qk[3:].eq(number + 1).all()
        assert model.part.eq(number + 2).all() and model.single.eq(number + 3).all()
        assert model.twice.eq(number + 4).all()

    with pytest.raises(HeadwayError, match="differs"):
        version(5, whole=False)
    assert not places.known
    version(10)
    assert set(places.known) == {"q", "k"} and len(model.loaded) == 5
    serves(10)
    for number in (20, 30):
        version(number)
        assert model.loaded == ["half", "single", "twice"]
        serves(number)
    with pytest.raises(HeadwayError, match="differs"):
        version(40, whole=False)
    version(50)
    serves(50)
