"""Which combinations of options are refused, and what to set instead.

Guarantees: an option that cannot be honoured ends the launch before anything starts, with one sentence that names it and the remedy.
What one option alone may hold stands at its definition in molt_ray/config.py.
"""

from __future__ import annotations

import re

from molt_ray.config import Config, refuse

GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "reinforce_baseline", "rloo"})  # they compare the samples of a group
# Names beside path/to/file.py:name. Kept here because the functions' modules import numpy and torch.
ESTIMATORS = GROUP_ESTIMATORS | {"reinforce", "flash_reinforce", "turn_credit", "gae", "on_policy_distill"}
LOSSES = frozenset({"ppo", "cispo", "gspo", "reinforce"})


def check(config: Config) -> Config:
    """Refuses combinations that cannot be honoured. Raises ConfigError naming the option and the remedy."""
    check_required(config)
    check_prompts(config)
    check_batches(config)
    check_layout(config)
    check_exactness(config)
    check_algorithm(config)
    check_kl(config)
    check_critic(config)
    return config


def check_required(c: Config) -> None:
    for option, value, what in (
        ("actor.model_name_or_path", c.actor.model_name_or_path, "a Hugging Face folder or hub name"),
        ("train.agent_path", c.train.agent_path, "a Python file that exports AgentRunner"),
        (
            "data.prompt_dataset",
            c.data.prompt_dataset or c.data.tasks,
            "a .jsonl, .parquet or .csv file, or families in --data.tasks",
        ),
    ):
        if not value:
            refuse(option, value, f"required: give {what}")


def check_prompts(c: Config) -> None:
    data = c.data
    if data.prompt_template.count("{question}") != 1:
        refuse("data.prompt_template", data.prompt_template, "must hold {question} once")
    if data.tools_key and not data.apply_chat_template:
        refuse(
            "data.tools_key", data.tools_key, "only the chat template shows tools: set --data.apply_chat_template True"
        )
    held_out = c.eval.dataset or c.eval.datasets
    if c.eval.dataset and c.eval.datasets:
        refuse("eval.datasets", c.eval.datasets, "excludes --eval.dataset: leave one of them out")
    for name, file in c.eval.datasets.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not isinstance(file, str) or not file:
            refuse("eval.datasets", {name: file}, "names, in letters, digits, - and _, of files")
    if c.train.rollout_only and c.ckpt.load_enable:
        refuse("train.rollout_only", True, "samples the model as it is: leave --ckpt.load_enable out, or export first")
    if c.ckpt.best_metric_key and not (held_out or c.eval.task_size):
        remedy = "needs an evaluation: give --eval.dataset or --eval.task_size"
        refuse("ckpt.best_metric_key", c.ckpt.best_metric_key, remedy)
    if c.eval.num_engines and not (held_out or c.eval.task_size):
        remedy = "needs an evaluation: give --eval.dataset or --eval.task_size, or leave it out"
        refuse("eval.num_engines", c.eval.num_engines, remedy)
    if c.eval.num_engines and c.train.rollout_only:
        refuse("eval.num_engines", c.eval.num_engines, "--train.rollout_only evaluates nothing: leave one of them out")
    if not data.tasks:
        if c.eval.task_size:
            refuse(
                "eval.task_size", c.eval.task_size, "needs --data.tasks; hold prompts of a file out in --eval.dataset"
            )
        return
    for option, value, remedy in (
        ("data.prompt_dataset", data.prompt_dataset, "excludes --data.tasks: leave one of them out"),
        ("data.label_key", data.label_key, "--data.tasks make their labels: leave it out"),
        ("data.tools_key", data.tools_key, "--data.tasks have no tools: leave it out"),
        ("data.image_key", data.image_key, "--data.tasks have no images: leave it out"),
        ("eval.dataset", held_out, "with --data.tasks, prompts are held out by --eval.task_size"),
    ):
        if value:
            refuse(option, value, remedy)
    from molt_ray.tasks import check_tasks  # and reasoning-gym, only for a run that uses it

    check_tasks(data.tasks)


def check_batches(c: Config) -> None:
    n, batch, step = c.rollout.n_samples_per_prompt, c.rollout.batch_size, c.train.batch_size
    if batch % n:
        refuse(
            "rollout.batch_size", batch, f"counts rollouts and must be a multiple of --rollout.n_samples_per_prompt {n}"
        )
    if step is not None and (step > batch or batch % step):
        refuse(
            "train.batch_size", step, f"must divide --rollout.batch_size {batch}, or be left out for one step per batch"
        )
    if c.world_size % c.fsdp.tp_size:
        refuse("fsdp.tp_size", c.fsdp.tp_size, f"must divide the {c.world_size} trainer ranks")
    if n == 1 and c.algo.advantage.estimator in GROUP_ESTIMATORS:
        refuse(
            "algo.advantage.estimator",
            c.algo.advantage.estimator,
            "compares the samples of a group: set --rollout.n_samples_per_prompt above 1",
        )
    if c.vllm.max_engines is not None and c.vllm.max_engines < c.vllm.num_engines:
        refuse("vllm.max_engines", c.vllm.max_engines, f"must be at least --vllm.num_engines {c.vllm.num_engines}")
    if c.rollout.max_runners is not None and c.rollout.max_runners < c.rollout.num_runners:
        refuse(
            "rollout.max_runners",
            c.rollout.max_runners,
            f"must be at least --rollout.num_runners {c.rollout.num_runners}",
        )


def check_layout(c: Config) -> None:
    kernel = c.fsdp.attn_implementation
    if c.fsdp.share_prefix and kernel not in ("auto", "sdpa"):
        refuse(
            "fsdp.attn_implementation",
            kernel,
            "--fsdp.share_prefix has attention of its own, on sdpa: use auto or sdpa",
        )


def check_exactness(c: Config) -> None:
    adv = c.algo.advantage
    if c.train.max_staleness > 0 and adv.is_correction_level == "off" and c.actor.ratio_base == "trainer":
        refuse(
            "algo.advantage.is_correction_level",
            "off",
            "stale tokens need a correction: leave it on auto, or set --train.max_staleness 0",
        )
    low, high = adv.is_correction_threshold
    if adv.is_correction_level == "binary_kl":
        if adv.is_correction_mode != "mask" or low != 0 or not 0 < high < 1:
            remedy = "needs --algo.advantage.is_correction_mode mask and --algo.advantage.is_correction_threshold 0 0.001 or the like"
            refuse("algo.advantage.is_correction_level", "binary_kl", remedy)
    elif not 0 <= low <= 1 <= high:
        refuse("algo.advantage.is_correction_threshold", (low, high), "needs 0 <= low <= 1 <= high")
    if c.reward.clip_range[0] >= c.reward.clip_range[1]:
        refuse("reward.clip_range", c.reward.clip_range, "needs low < high")


def check_algorithm(c: Config) -> None:
    actor, reward = c.actor, c.reward
    for option, name, known in (
        ("algo.advantage.estimator", c.algo.advantage.estimator, ESTIMATORS),
        ("algo.advantage.token_estimator", c.algo.advantage.token_estimator, ESTIMATORS | {""}),
        ("algo.group_filter", c.algo.group_filter, {""}),
        ("actor.loss_mode", actor.loss_mode, LOSSES),
    ):
        if ":" not in name and name not in known:
            refuse(option, name, f"give {', '.join([*sorted(known - {''}), 'path/to/file.py:name'])}")
    updates = c.rollout.batch_size // (c.train.batch_size or c.rollout.batch_size) * c.train.max_epochs
    if actor.dual_clip is not None and actor.loss_mode != "ppo":
        refuse("actor.dual_clip", actor.dual_clip, "belongs to --actor.loss_mode ppo; leave it out")
    if actor.loss_mode == "cispo" and actor.eps_clip_low_high[1] < 1:
        refuse(
            "actor.eps_clip_low_high", actor.eps_clip_low_high, "cispo takes the ceiling of the ratio itself: use 0 5"
        )
    if actor.loss_mode == "reinforce" and (updates > 1 or actor.ratio_base == "engine"):
        remedy = "has no ratio: leave out --train.batch_size, --train.max_epochs and --actor.ratio_base, or use ppo"
        refuse("actor.loss_mode", "reinforce", remedy)
    if actor.ratio_base == "engine" and c.correction_level != "off":
        remedy = "would count twice beside --actor.ratio_base engine: leave it on auto"
        refuse("algo.advantage.is_correction_level", c.correction_level, remedy)
    if reward.overlong_penalty and not 0 < reward.overlong_buffer <= reward.overlong_length:
        remedy = f"needs --reward.overlong_length, now {reward.overlong_length}, and an --reward.overlong_buffer within it, now {reward.overlong_buffer}"
        refuse("reward.overlong_penalty", reward.overlong_penalty, remedy)
    low, high = c.algo.dynamic_filtering_range
    if not low < high:
        refuse("algo.dynamic_filtering_range", (low, high), "needs low < high")
    if c.algo.dynamic_filtering_enable and c.rollout.n_samples_per_prompt == 1:
        refuse(
            "algo.dynamic_filtering_enable", True, "compares a group's mean: set --rollout.n_samples_per_prompt above 1"
        )


def check_kl(c: Config) -> None:
    kl, distill = c.algo.kl, c.algo.advantage.estimator == "on_policy_distill"
    if c.algo.advantage.token_estimator == "on_policy_distill" and not distill:
        remedy = "belongs to --algo.advantage.estimator on_policy_distill; leave it out"
        refuse("algo.advantage.token_estimator", "on_policy_distill", remedy)
    if distill:
        if not c.ref.model_name_or_path:
            refuse(
                "ref.model_name_or_path", "", "required by --algo.advantage.estimator on_policy_distill: the teacher"
            )
        if not c.needs_reference:
            refuse(
                "algo.kl.init_coef", kl.init_coef, "must be above 0 with on_policy_distill, which has no other signal"
            )
        if kl.use_loss or kl.estimator != "k1" or kl.target is not None:
            refuse(
                "algo.kl", kl.model_dump(), "on_policy_distill takes k1 as its advantage: leave the other options out"
            )
    if not c.needs_reference:
        for option, value in (
            ("algo.kl.use_loss", kl.use_loss),
            ("algo.kl.target", kl.target),
            ("ref.model_name_or_path", c.ref.model_name_or_path),
        ):
            if value:
                refuse(option, value, "needs a KL: set --algo.kl.init_coef above 0")
    if (ranks := c.ref.num_nodes * c.ref.num_gpus_per_node) % c.ref.tp_size:
        refuse("ref.tp_size", c.ref.tp_size, f"must divide the {ranks} reference ranks")


def check_critic(c: Config) -> None:
    if (ranks := c.critic.num_nodes * c.critic.num_gpus_per_node) % c.critic.tp_size:
        refuse("critic.tp_size", c.critic.tp_size, f"must divide the {ranks} critic ranks")
    if c.needs_critic:
        if c.ckpt.max_num == 1:
            refuse(
                "ckpt.max_num", 1, "policy and critic are saved side by side, so that one may be ahead: keep 2 at least"
            )
        return
    for option, value in (
        ("critic.model_name_or_path", c.critic.model_name_or_path),
        ("actor.freezing_steps", c.actor.freezing_steps),
        ("algo.advantage.token_estimator", c.algo.advantage.token_estimator == "gae"),
    ):
        if value:
            refuse(option, value, "needs a critic: set --algo.advantage.estimator gae")
