"""Who gets which device."""

import pytest

from headway.base.errors import UsageError
from headway.config.inference import InferenceSettings
from headway.config.shared import PlacementSettings
from headway.launch.placement import gpus_per_engine, place


def test_cores_are_shared_evenly_on_cpu() -> None:
    placement = place(PlacementSettings(engines=1, trainer_ranks=1), gpus=[], cores=8)
    assert placement.trainer["OMP_NUM_THREADS"] == "4"
    assert placement.engines == [placement.trainer]


def test_a_process_never_gets_less_than_one_thread() -> None:
    placement = place(PlacementSettings(engines=3, trainer_ranks=4), gpus=[], cores=2)
    assert placement.trainer["OMP_NUM_THREADS"] == "1"


def test_enough_gpus_are_split() -> None:
    placement = place(PlacementSettings(engines=2, trainer_ranks=2), gpus=["0", "1", "2", "3"], cores=8)
    assert placement.trainer == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert placement.engines == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]


def test_one_gpu_is_shared() -> None:
    placement = place(PlacementSettings(), gpus=["0"], cores=8)
    assert placement.trainer == placement.engines[0] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert "share" in placement.explanation


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [(PlacementSettings(device="cuda"), []), (PlacementSettings(trainer_ranks=2), ["0"])],
)
def test_what_cannot_be_placed_is_refused(settings: PlacementSettings, gpus: list[str]) -> None:
    with pytest.raises(UsageError):
        place(settings, gpus, cores=4)


def test_an_engine_of_many_gpus_gets_them_all() -> None:
    vllm = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    each = gpus_per_engine(InferenceSettings(vllm=vllm))
    assert each == 4 and gpus_per_engine(InferenceSettings(engine="embedded", vllm=vllm)) == 1
    gpus = [str(i) for i in range(9)]
    placement = place(PlacementSettings(engines=2, trainer_ranks=1), gpus, cores=8, gpus_each=each)
    assert [engine["CUDA_VISIBLE_DEVICES"] for engine in placement.engines] == ["1,2,3,4", "5,6,7,8"]
    with pytest.raises(
        UsageError, match=r"1 trainer rank\(s\) \+ 2 engine\(s\) x 4 GPUs need 9 GPUs, but 8 are visible"
    ):
        place(PlacementSettings(engines=2, trainer_ranks=1), gpus[:8], cores=8, gpus_each=each)


@pytest.mark.parametrize("size", [0, -2, "2", True, 1.5])
def test_a_parallel_size_that_is_no_count_is_refused(size: object) -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size must be a whole number"):
        gpus_per_engine(InferenceSettings(vllm={"tensor_parallel_size": size}))
