"""Versions that share tensors with older ones: only what changed is fetched, and everything is verified."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_swarm_weights import RUN_KEY, Server, files_in, serving
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.models.adapters.lora import adapter_tensors, apply_lora, load_adapter, merge_adapter
from headway.models.attention import PackedPlan
from headway.models.checkpoints.folders import load_model
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.tiny import resolve_model
from headway.swarm.weights.download import Downloader, Mirrors
from headway.swarm.weights.manifest import HashedFolder, WeightManifest
from headway.swarm.weights.relay import Relay
from headway.swarm.weights.shards import shard_sizes
from headway.swarm.weights.store import ShardStore, publish_folder
from headway.swarm.weights.versions import (
    ADAPTER,
    VersionFolders,
    update_of,
    verify_tensors,
    write_tensors,
    write_version,
)

LORA = LoraSettings(rank=4, alpha=8.0)


def tensors_of(changed: int) -> dict[str, Tensor]:
    """Return a model's tensors: one of 4 MB that is frozen, one of 1 MB that is trained, many small ones."""
    made = torch.Generator().manual_seed(0)
    small = {f"norm.{number}": torch.randn(100, generator=made) for number in range(50)}
    frozen, trained = torch.randn(1000, 1000, generator=made), torch.randn(250, 1000, generator=made)
    return {"b.frozen": frozen, "a.trained": trained + changed, "c.trained": trained - changed, **small}


def publish(store: ShardStore, folder: Path, version: int) -> WeightManifest:
    folder.mkdir()
    fingerprint = write_version(folder, resolve_model("tiny"), version, tensors_of(version))
    return publish_folder(store, RUN_KEY, "a-run", version, fingerprint, folder)


@torch.no_grad()
def logits_of(model: DecoderLM) -> Tensor:
    plan = PackedPlan([5], torch.device("cpu"))
    return model.logits(model(PackedTokens(torch.arange(5), plan.positions, plan)).hidden_TD)


def test_shards_end_where_large_tensors_end(tmp_path: Path) -> None:
    big, path = torch.zeros(600), tmp_path / "a.safetensors"
    save_file({"a": big, "b": torch.zeros(3), "c": torch.zeros(5), "d": torch.zeros(1000)}, path)
    header = path.stat().st_size - 4 * 1608
    assert shard_sizes(path, 1000)[-8:] == [1000, 1000, 400, 32, 1000, 1000, 1000, 1000]
    assert sum(shard_sizes(path, 1000)) == header + 4 * 1608
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 2500)  # no such file: cut like any other
    assert shard_sizes(tmp_path / "b.safetensors", 1000) == [1000, 1000, 500]


def test_tensors_that_did_not_change_are_not_fetched_again(tmp_path: Path) -> None:
    source = Server(ShardStore(tmp_path / "source", RUN_KEY.public))

    async def main() -> list[int]:
        sent = []
        async with serving(source.app) as (peer,):
            relay = Relay(Mirrors.of(peer, []), tmp_path / "relay", RUN_KEY.public)
            async with serving(relay.app) as (passing_on,):
                worker = Downloader(Mirrors.of(passing_on, []), ShardStore(tmp_path / "mine", RUN_KEY.public))
                for version in (1, 2):
                    manifest = publish(source.store, tmp_path / f"v{version}", version)
                    await relay.downloader.fetch(version)
                    await worker.fetch(version)
                    folder = worker.store.assemble(version)
                    verify_tensors(folder, manifest.fingerprint)
                    assert files_in(folder) == files_in(tmp_path / f"v{version}")
                    sent.append((source.bandwidth.sent, relay.bandwidth.sent, manifest.size))
        (first, passed, whole), (after, passed_after, _) = sent
        assert first == passed == whole > 6_000_000
        assert after - first == passed_after - passed
        return [whole, after - first]

    whole, fetched = asyncio.run(main())
    # Two tensors of 1 MB each, and the file with the small ones' sums.
    assert 2_000_000 <= fetched < 2_100_000 < whole


def test_a_shard_of_an_older_version_that_the_disk_changed_is_fetched(tmp_path: Path) -> None:
    source = Server(ShardStore(tmp_path / "source", RUN_KEY.public))

    async def main() -> None:
        async with serving(source.app) as (peer,):
            worker = Downloader(Mirrors.of(peer, []), ShardStore(tmp_path / "mine", RUN_KEY.public))
            publish(source.store, tmp_path / "v1", 1)
            await worker.fetch(1)
            path = worker.store.assemble(1) / "rank_00000.safetensors"
            data = bytearray(path.read_bytes())
            data[2_500_000] ^= 1  # inside the frozen tensor
            path.write_bytes(data)
            publish(source.store, tmp_path / "v2", 2)
            before = source.bandwidth.sent
            await worker.fetch(2)
            assert 2_000_000 + (1 << 20) <= source.bandwidth.sent - before < 2_100_000 + (1 << 20)
            assert files_in(worker.store.assemble(2)) == files_in(tmp_path / "v2")

    asyncio.run(main())


def test_of_an_adapter_only_the_adapter_is_fetched(tmp_path: Path) -> None:
    base = resolve_model("tiny")
    versions, store = VersionFolders(tmp_path / "versions", base, LORA), ShardStore(tmp_path / "s", RUN_KEY.public)
    source, before = Server(store), None
    model = load_model(base)
    apply_lora(model, LORA)

    def trained(version: int) -> WeightUpdate:
        """Publish an adapter as the trainer does."""
        folder = tmp_path / f"trainer-{version}"
        folder.mkdir()
        fingerprint = write_tensors(folder, version, {n: t + 0.02 * version for n, t in adapter_tensors(model)})
        update = update_of(folder, version, fingerprint)
        update.adapter = "policy"
        return update

    async def main() -> list[int]:
        nonlocal before
        fetched, on_disk = [], set()
        async with serving(source.app) as (peer,):
            worker = Downloader(Mirrors.of(peer, []), ShardStore(tmp_path / "mine", RUN_KEY.public))
            for version in (1, 2, 3):
                update = trained(version)
                folder = versions.fetch(update)
                terms = versions.adapter_terms()
                manifest = publish_folder(
                    store, RUN_KEY, "a-run", version, update.fingerprint, folder, adapter=terms, before=before
                )
                before = HashedFolder(folder, manifest)
                sent = source.bandwidth.sent
                await worker.fetch(version)
                fetched.append(source.bandwidth.sent - sent)
                worker.store.keep(version, 1)  # the base's bytes outlive the version that they came with
                mine = worker.store.assemble(version)
                assert terms is not None and files_in(mine) == files_in(folder)
                verify_tensors(mine, terms.base)
                verify_tensors(mine / ADAPTER, update.fingerprint)
                on_disk.add((mine / "rank_00000.safetensors").stat().st_ino)
        assert len(on_disk) == 1  # one base, for all versions
        return fetched

    whole, second, third = asyncio.run(main())
    assert whole > 1_900_000 and second < 120_000 and third < 120_000
    merged = load_model(base)
    load_adapter(merged, 0, ((name, tensor + 0.06) for name, tensor in adapter_tensors(model)), LORA)
    merge_adapter(merged)
    trusted = logits_of(versions.model(3, "float32"))
    assert torch.allclose(trusted, logits_of(merged), atol=1e-5)
    assert not torch.allclose(trusted, logits_of(versions.model(2, "float32")), atol=1e-2)
    with pytest.raises(HeadwayError, match=r"model\.lora"):
        versions.fetch(update_of(tmp_path / "trainer-3", 3, ""))
