"""Layers of settings: files, flags, unions, lists, and errors that teach."""

from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.config import renamed
from headway.config.commands import COMMAND_SETTINGS
from headway.config.flags import locate
from headway.config.loader import load_settings
from headway.config.optimizers import AdamW, Muon
from headway.config.rl import RlSettings
from headway.config.schema import Kind


def layer(folder: Path, name: str, text: str) -> list[str]:
    path = folder / name
    path.write_text(text)
    return ["@", str(path)]


def load(*argv: str) -> RlSettings:
    return load_settings(RlSettings, argv).settings


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(RlSettings, argv)
    assert "\n" not in str(caught.value), "one error, one line"
    return str(caught.value)


def test_nothing_given_gives_the_defaults() -> None:
    resolved = load_settings(RlSettings, [])
    assert resolved.settings == RlSettings()
    assert resolved.origins == {}
    assert not resolved.dry_run


def test_later_files_win_and_flags_win_over_files(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", "seed = 1\nmax_steps = 10\n[trainer.optim]\nlr = 1e-4\n")
    mine = layer(tmp_path, "mine.toml", "max_steps = 20\nseq_len = 64\n")
    resolved = load_settings(RlSettings, [*base, *mine, "--seq_len", "128", "--dry-run"])
    settings = resolved.settings
    assert (settings.seed, settings.max_steps, settings.seq_len, settings.trainer.optim.lr) == (1, 20, 128, 1e-4)
    assert resolved.dry_run
    assert resolved.origins == {
        "seed": str(tmp_path / "base.toml"),
        "trainer.optim.lr": str(tmp_path / "base.toml"),
        "max_steps": str(tmp_path / "mine.toml"),
        "seq_len": "--seq_len",
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["--trainer.optim.lr", "1e-5"],
        ["--trainer.optim.lr=1e-5"],
        ["--lr", "1e-5"],
        ["--lr", "3", "--trainer.optim.lr", "1e-5"],
        ["--trainer.optim", '{"lr": 1e-5}'],
        ["--trainer.optim", "{lr = 1e-5}"],
    ],
)
def test_ways_to_write_a_flag(argv: list[str]) -> None:
    resolved = load_settings(RlSettings, argv, aliases={"lr": "trainer.optim.lr"})
    assert resolved.settings.trainer.optim == AdamW(lr=1e-5)


def test_booleans_need_no_value() -> None:
    assert load("--trainer.compile").trainer.compile
    assert load("--trainer.compile", "--seed", "3").trainer.compile
    assert load("--trainer.compile", "true").trainer.compile
    assert not load("--no-inference.prefix_cache").inference.prefix_cache
    assert not load("--inference.prefix-cache", "false").inference.prefix_cache


def test_sections_that_are_off_by_default_can_be_switched_on_and_off(tmp_path: Path) -> None:
    on = layer(tmp_path, "lora.toml", "[model.lora]\nrank = 4\n")
    assert load("--model.lora").model.lora is not None
    assert load(*on).model.lora.rank == 4  # type: ignore[union-attr] # it is on
    assert load(*on, "--no-model.lora").model.lora is None
    assert load(*on, "--model.lora", "none").model.lora is None


def test_none_unsets_an_optional_setting(tmp_path: Path) -> None:
    named = layer(tmp_path, "a.toml", '[run]\nname = "a"\n[orchestrator.sampling]\nmax_tokens = 5\n')
    unset = layer(tmp_path, "b.toml", '[orchestrator.sampling]\nmax_tokens = "none"\n')
    settings = load(*named, *unset, "--run.name", "None")
    assert settings.run.name is None
    assert settings.orchestrator.sampling.max_tokens is None
    assert load("--orchestrator.algorithm.normalize", "none").orchestrator.algorithm.type == "grpo"


def test_switching_a_union_drops_the_keys_of_the_branch_it_leaves(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", "[trainer.optim]\nbetas = [0.8, 0.9]\nlr = 1e-3\n")
    muon = layer(tmp_path, "muon.toml", '[trainer.optim]\ntype = "muon"\nmomentum = 0.5\n')
    assert load(*base, *muon).trainer.optim == Muon(momentum=0.5)
    assert load(*muon, *base, "--trainer.optim.type", "adamw").trainer.optim == AdamW()


def test_naming_the_same_type_again_keeps_its_keys(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", "[trainer.optim]\nlr = 1e-3\n")
    again = layer(tmp_path, "again.toml", '[trainer.optim]\ntype = "adamw"\neps = 1e-6\n')
    assert load(*base, *again).trainer.optim == AdamW(lr=1e-3, eps=1e-6)


def test_flags_are_one_layer_so_their_order_does_not_matter() -> None:
    flags = [["--trainer.optim.lr", "1e-3"], ["--trainer.optim.type", "muon"]]
    expected = Muon(lr=1e-3)
    assert load(*flags[0], *flags[1]).trainer.optim == expected
    assert load(*flags[1], *flags[0]).trainer.optim == expected


def test_lists_are_replaced_by_files_and_patched_by_flags(tmp_path: Path) -> None:
    first = layer(tmp_path, "a.toml", '[[orchestrator.envs]]\nid = "a"\n[[orchestrator.envs]]\nid = "b"\nratio = 3\n')
    second = layer(tmp_path, "b.toml", '[[orchestrator.envs]]\nid = "c"\n')
    assert [env.id for env in load(*first, *second).orchestrator.envs] == ["c"]
    flags = ["--orchestrator.envs.0.ratio", "2", "--orchestrator.envs.1.args.words", "[1, 2]"]
    envs = load(*first, *flags, "--orchestrator.envs.2", '{id = "d"}').orchestrator.envs
    assert [(env.id, env.ratio, env.args) for env in envs] == [
        ("a", 2, {}),
        ("b", 3, {"words": [1, 2]}),
        ("d", 1, {}),
    ]


def test_items_of_plain_lists_are_patched_too(tmp_path: Path) -> None:
    gates = layer(tmp_path, "a.toml", '[orchestrator]\ngates = ["a:b", "c:d"]\n')
    resolved = load_settings(RlSettings, [*gates, "--orchestrator.gates.1", "x:y", "--orchestrator.gates.2=z:z"])
    assert resolved.settings.orchestrator.gates == ["a:b", "x:y", "z:z"]
    assert resolved.origin("orchestrator.gates") == str(tmp_path / "a.toml")
    assert resolved.origin("orchestrator.engines") == "default"


def test_flags_patch_what_earlier_flags_gave() -> None:
    given = ["--orchestrator.envs", '[{id = "a"}]', "--orchestrator.gates", '["a:b"]']
    settings = load(*given, "--orchestrator.envs.1.id", "b", "--orchestrator.gates.0", "c:d")
    assert [env.id for env in settings.orchestrator.envs] == ["a", "b"]
    assert settings.orchestrator.gates == ["c:d"]
    replaced = load("--trainer.optim", "[{}]", "--trainer.optim.lr", "1e-3", "--trainer.optim.eps=1e-6").trainer.optim
    assert replaced == AdamW(lr=1e-3, eps=1e-6)
    message = refusal(*given, "--orchestrator.envs.3.id", "b")
    assert message == "--orchestrator.envs.3.id: there are only 1 items; the next index is 1"


def test_free_tables_take_any_keys_and_merge(tmp_path: Path) -> None:
    base = layer(tmp_path, "a.toml", "[inference.vllm]\na = 1\nb = {c = 2}\n")
    settings = load(*base, "--inference.vllm.b.d", "x", "--inference.vllm.e", "true")
    assert settings.inference.vllm == {"a": 1, "b": {"c": 2, "d": "x"}, "e": True}


def test_negative_numbers_are_values() -> None:
    assert load("--seed", "-3").seed == -3


def test_unknown_keys_name_the_file_and_the_nearest_setting(tmp_path: Path) -> None:
    argv = layer(tmp_path, "a.toml", "[trainer.optim]\nlearning_rates = 1\n")
    message = refusal(*layer(tmp_path, "b.toml", "[trainer.optim]\nwieght_decay = 1\n"))
    assert message == f"{tmp_path / 'b.toml'}: trainer.optim.wieght_decay is not a setting; did you mean weight_decay?"
    assert refusal(*argv).startswith(f"{tmp_path / 'a.toml'}: trainer.optim.learning_rates is not a setting")


def test_unknown_keys_and_wrong_values_are_said_together(tmp_path: Path) -> None:
    text = '[trainer.optim]\nlrr = 2\nlr = "fast"\nwieght_decay = 1\n[[orchestrator.envs]]\nid = 5\nnam = "a"\n'
    with pytest.raises(UsageError) as caught:
        load(*layer(tmp_path, "a.toml", text))
    lines = str(caught.value).splitlines()
    named = ("trainer.optim.lrr", "trainer.optim.wieght_decay", "orchestrator.envs.0.nam")
    named += ("trainer.optim.lr ", "orchestrator.envs.0.id")
    assert len(lines) == 5 and all(any(name in line for line in lines) for name in named), lines


def test_unknown_flags_name_the_nearest_setting() -> None:
    assert (
        refusal("--trainer.optim.lrr", "1") == "--trainer.optim.lrr: no such setting; did you mean --trainer.optim.lr?"
    )
    assert refusal("--lr", "1") == "--lr: no such setting; did you mean --trainer.optim.lr?"
    assert refusal("--group-size", "4") == "--group-size: no such setting; did you mean --orchestrator.group_size?"
    assert refusal("--no-seed").startswith("--no-seed: no such setting")
    assert refusal("--dry-runn") == "--dry-runn: no such setting; did you mean --dry-run?"
    assert refusal("--zzzzzz") == "--zzzzzz: no such setting"


def test_former_names_are_refused_with_the_present_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed.SETTINGS, "orchestrator.old_size", "orchestrator.group_size")
    monkeypatch.setitem(renamed.SETTINGS, "orchestrator.envs.N.old", "orchestrator.envs.N.id")
    monkeypatch.setitem(renamed.VALUES, ("rollouts.type", "sockets"), "zmq")
    monkeypatch.setitem(renamed.VALUES, ("log.level", "NOISY"), "DEBUG")
    message = "--orchestrator.old-size: this setting is now called --orchestrator.group_size"
    assert refusal("--orchestrator.old-size", "4") == message
    file = layer(tmp_path, "a.toml", "[[orchestrator.envs]]\nold = 'x'\n")
    assert refusal(*file) == f"{tmp_path / 'a.toml'}: orchestrator.envs.0.old is now called orchestrator.envs.0.id"
    assert refusal("--rollouts.type", "sockets") == '--rollouts.type "sockets" is now called "zmq"'
    assert refusal("--log.level", "NOISY") == '--log.level "NOISY" is now called "DEBUG"'


def test_renamed_settings_name_ones_that_exist() -> None:
    for present in renamed.SETTINGS.values():
        assert any(locate(Kind(kind), present.replace(".N.", ".0.")) for kind in COMMAND_SETTINGS.values()), present


def test_a_key_of_another_branch_says_which() -> None:
    message = refusal("--orchestrator.algorithm.teacher.base_url", "http://x")
    assert 'orchestrator.algorithm.type = "opd" or "sft"' in message
    assert "the type is 'grpo'" in message


def test_wrong_values_say_where_and_what(tmp_path: Path) -> None:
    wrong = layer(tmp_path, "a.toml", 'seq_len = "long"\n')
    assert refusal(*wrong).startswith(f"{tmp_path / 'a.toml'}: seq_len should be a valid integer")
    assert refusal(*wrong).endswith("(got 'long')")
    assert refusal("--placement.device", "tpu").startswith("--placement.device should be 'auto', 'cpu' or 'cuda'")
    assert refusal("--trainer.optim.type", "adam").startswith("--trainer.optim.type must be one of adamw, muon")
    assert refusal("--weights.type", "collective") == '--weights.type "collective" is now called "point_to_point"'
    assert refusal("--inference.port", "70000").startswith("--inference.port should be less than or equal to 65535")
    single = refusal(*layer(tmp_path, "b.toml", '[orchestrator.envs]\nid = "a"\n'))
    assert "orchestrator.envs must be a list of tables, [[orchestrator.envs]] (got {" in single
    assert refusal("--trainer", "3") == "--trainer must be a table (got 3)"
    assert "orchestrator.envs.0.args must be a table (got 3)" in refusal(
        "--orchestrator.envs", '[{id = "a", args = 3}]'
    )


def test_what_cannot_be_read_comes_with_an_example_of_its_kind() -> None:
    assert refusal("--orchestrator.envs", "reverse-text").endswith("""for example '[{id = "..."}]'""")
    assert refusal("--orchestrator.gates", "mine").endswith("""for example '["a", "b"]'""")
    assert refusal("--trainer.loss", "dppo").endswith("""for example '{type = "dppo"}'""")
    assert refusal("mine.toml").endswith("did you mean `@ mine.toml`?")


@pytest.mark.parametrize(
    "line",
    [
        "seed = true",
        'seed = "5"',
        "max_steps = 2.0",
        '[trainer]\ncompile = "yes"',
        '[trainer.optim]\nlr = "1e-5"',
        "[run]\nname = 3",
    ],
)
def test_values_are_not_bent_into_another_type(line: str, tmp_path: Path) -> None:
    assert "should be a valid" in refusal(*layer(tmp_path, "a.toml", line))


def test_missing_settings_say_how_to_give_them() -> None:
    assert refusal("--orchestrator.envs.0.ratio", "2") == (
        "--orchestrator.envs.0.ratio: orchestrator.envs.0.id is missing; "
        "set it in a file or with --orchestrator.envs.0.id"
    )
    assert refusal("--orchestrator.envs.4.id", "a").startswith("--orchestrator.envs.4.id: there are only 0 items")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["@"], "@ wants a file after it, as in `@ base.toml`"),
        (["--seed", "1", "--help"], "--help comes right after the command, as in `headway rl --help`"),
        (["--seed"], "--seed wants a value after it"),
        (["--seed", "--trainer.compile"], "--seed wants a value after it"),
        (
            ["--no-trainer.compile=true"],
            "--no-trainer.compile takes no value; to set one, write --trainer.compile=true",
        ),
        (["rl"], "unexpected argument 'rl': settings are files (`@ file.toml`) and flags (`--name value`)"),
        (
            ["--orchestrator.gates", "a,b"],
            "--orchestrator.gates: cannot read 'a,b'; write a JSON or TOML literal, for example '[\"a\", \"b\"]'",
        ),
    ],
)
def test_command_lines_that_make_no_sense(argv: list[str], message: str) -> None:
    assert refusal(*argv) == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert refusal("@", str(missing)).startswith(f"{missing}: no such file")
    assert refusal("@", str(tmp_path)).startswith(f"{tmp_path}: cannot read it: Is a directory")
    assert refusal("@", "a\0b") == "'a\\x00b' cannot be a file: embedded null byte"
    assert "is not valid TOML" in refusal(*layer(tmp_path, "broken.toml", "seed = \n"))
    assert "line 1" in refusal(*layer(tmp_path, "broken.toml", "seed = \n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert refusal("@", str(binary)) == f"{binary}: is not text in UTF-8"


def test_every_error_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load("--seq_len", "x", "--max_steps", "0")
    assert str(caught.value).splitlines() == [
        "--seq_len should be a valid integer (got 'x')",
        "--max_steps should be greater than or equal to 1 (got 0)",
    ]
