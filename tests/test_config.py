"""Options: recipe, then flags; whatever cannot be honoured is refused by name, with the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from molt_ray.command_line import build, own_functions_from, parse
from molt_ray.config import Config, ConfigError

ROOT = Path(__file__).parent.parent
NEEDED = ["--actor.model_name_or_path", "m", "--train.agent_path", "a.py", "--data.prompt_dataset", "p.jsonl"]


def test_flags_go_on_top_of_the_recipe(tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "actor: {model_name_or_path: m, adam: {lr: 2.0e-4}}\ntrain: {agent_path: a.py, seed: 7}\ndata: {prompt_dataset: p}\n"
    )
    config = parse(["--train.seed", "9", "--vllm.extra", '{"max_num_partial_prefills": 1}'], recipe)
    assert (config.actor.adam.lr, config.train.seed) == (2e-4, 9)
    assert config.vllm.extra == {"max_num_partial_prefills": 1}


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"train": {"no_such": 1}}, "--train.no_such: no such option"),
        ({"nonsense": {}}, "--nonsense: no such option"),
        ({"rollout": {"batch_size": "many"}}, "--rollout.batch_size 'many'"),
        ({"rollout": {"temperature": 0}}, "--rollout.temperature 0"),
    ],
)
def test_unknown_names_and_wrong_types_in_a_recipe(tree: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        build(tree)


@pytest.mark.parametrize(
    ("flags", "option", "remedy"),
    [
        ([], "--actor.model_name_or_path", "required"),
        (
            [*NEEDED, "--rollout.batch_size", "10", "--rollout.n_samples_per_prompt", "4"],
            "--rollout.batch_size 10",
            "multiple",
        ),
        ([*NEEDED, "--train.batch_size", "100"], "--train.batch_size 100", "must divide"),
        ([*NEEDED, "--fsdp.tp_size", "3", "--actor.num_gpus_per_node", "4"], "--fsdp.tp_size 3", "must divide"),
        (
            [*NEEDED, "--algo.advantage.estimator", "grpo", "--rollout.n_samples_per_prompt", "1"],
            "--algo.advantage.estimator",
            "above 1",
        ),
        (
            [*NEEDED, "--algo.advantage.is_correction_level", "off"],
            "--algo.advantage.is_correction_level",
            "max_staleness 0",
        ),
        (
            [*NEEDED, "--fsdp.share_prefix", "True", "--fsdp.attn_implementation", "flash_attention_2"],
            "--fsdp.attn_implementation",
            "use auto or sdpa",
        ),
        ([*NEEDED, "--rollout.num_runners", "3", "--rollout.max_runners", "2"], "--rollout.max_runners 2", "at least"),
        ([*NEEDED, "--algo.advantage.is_correction_threshold", "2", "5"], "is_correction_threshold", "low <= 1"),
        (
            [*NEEDED, "--algo.advantage.estimator", "gropo"],
            "--algo.advantage.estimator 'gropo'",
            "grpo, on_policy_distill",
        ),
        ([*NEEDED, "--algo.advantage.token_estimator", "x"], "--algo.advantage.token_estimator 'x'", "turn_credit"),
        ([*NEEDED, "--algo.group_filter", "mine.py"], "--algo.group_filter 'mine.py'", "path/to/file.py:name"),
        ([*NEEDED, "--eval.num_engines", "1"], "--eval.num_engines 1", "--eval.dataset"),
        (
            [*NEEDED, "--eval.num_engines", "1", "--eval.dataset", "x.jsonl", "--train.rollout_only", "True"],
            "--eval.num_engines 1",
            "--train.rollout_only",
        ),
        ([*NEEDED, "--actor.loss_mode", "sppo"], "--actor.loss_mode 'sppo'", "cispo, gspo, ppo"),
        ([*NEEDED, "--actor.loss_mode", "cispo"], "--actor.eps_clip_low_high", "use 0 5"),
        ([*NEEDED, "--actor.loss_mode", "gspo", "--actor.dual_clip", "3"], "--actor.dual_clip 3.0", "leave it out"),
        ([*NEEDED, "--actor.loss_mode", "reinforce", "--train.max_epochs", "2"], "--actor.loss_mode", "no ratio"),
        (
            [*NEEDED, "--actor.ratio_base", "engine", "--algo.advantage.is_correction_level", "geo"],
            "is_correction_level 'geo'",
            "count twice",
        ),
        ([*NEEDED, "--algo.advantage.is_correction_level", "binary_kl"], "is_correction_level", "mode mask"),
        ([*NEEDED, "--reward.overlong_penalty", "1"], "--reward.overlong_penalty", "--reward.overlong_length"),
        ([*NEEDED, "--algo.dynamic_filtering_range", "1", "0"], "dynamic_filtering_range", "low < high"),
        (
            [*NEEDED, "--algo.dynamic_filtering_enable", "True", "--rollout.n_samples_per_prompt", "1"],
            "--algo.dynamic_filtering_enable",
            "above 1",
        ),
    ],
)
def test_contradictions_are_refused_with_the_remedy(flags: list[str], option: str, remedy: str):
    with pytest.raises(ConfigError) as e:
        parse(flags)
    assert option in str(e.value) and remedy in str(e.value)


def test_correction_is_on_by_default_exactly_when_tokens_may_be_stale():
    assert parse(NEEDED).correction_level == "token"
    assert parse([*NEEDED, "--train.max_staleness", "0"]).correction_level == "off"
    assert parse([*NEEDED, "--actor.ratio_base", "engine"]).correction_level == "off"


def test_the_names_that_are_checked_are_those_of_the_functions():
    from molt_ray import checks
    from molt_ray.algorithm import advantage, loss, token_advantage

    assert checks.ESTIMATORS == advantage.ESTIMATORS.keys() == token_advantage.STAGE_TWO.keys()
    assert loss.LOSSES.keys() == checks.LOSSES


def test_paths_of_own_functions_are_taken_from_the_callers_folder(tmp_path: Path):
    config = parse([*NEEDED, "--actor.loss_mode", "mine.py:loss", "--algo.group_filter", "/at/mine.py:keep"])
    own_functions_from(config, tmp_path)
    assert config.actor.loss_mode == f"{tmp_path}/mine.py:loss"
    assert (config.algo.group_filter, config.algo.advantage.estimator) == ("/at/mine.py:keep", "reinforce")


def test_outputs_are_absolute_and_taken_from_the_root(tmp_path: Path):
    config = parse([*NEEDED, "--run.name", "r"], root=tmp_path)
    assert config.run.dir == str(tmp_path / "runs/r")
    assert config.ckpt.path == str(tmp_path / "runs/r/checkpoints")
    assert config.actor.model_name_or_path == "m"  # no such folder: a name on the hub


def test_every_option_has_its_line_of_doc():
    for section in (Config(), *(getattr(Config(), name) for name in Config.model_fields)):
        source = Path(sys.modules[type(section).__module__].__file__).read_text()
        for name, field in type(section).model_fields.items():
            if not hasattr(field.default, "model_fields"):
                assert f"    {name}: " in source and source.split(f"    {name}: ", 1)[1].split("\n")[
                    1
                ].strip().startswith('"""'), name


def test_help_imports_nothing_heavy():
    """--help answers at once because neither ray, torch, vllm nor transformers is imported for it."""
    code = (
        "import sys; sys.argv = ['train.py', '--help']\n"
        "sys.path.insert(0, 'jobs')\n"
        "import train\n"
        "try: train.main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'ray', 'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--algo.advantage.estimator" in done.stdout and "--recipe" in done.stdout


@pytest.mark.parametrize("recipe", sorted((ROOT / "jobs/recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(recipe: Path):
    config = parse([], recipe, root=ROOT)
    assert (ROOT / config.train.agent_path).suffix == ".py"
