"""Every option of molt_ray, in one typed tree.

Guarantees: nothing heavy is imported here, so `--help` answers at once; an unknown key or a wrong type is refused. How options are read
stands in molt_ray/command_line.py, which combinations are refused in molt_ray/checks.py. Where a published flag has a meaning
here its name holds (docs/flags.md lists each). Batch sizes count rollouts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from molt_ray.section import ConfigError, JsonDict, Section


class AdamConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; norms and biases are exempt."""


class ActorConfig(Section):
    model_name_or_path: str = ""
    """Hugging Face folder or hub name of the policy (required)."""
    num_nodes: int = Field(default=1, ge=1)
    """Nodes that hold trainer ranks."""
    num_gpus_per_node: int = Field(default=1, ge=1)
    """Trainer ranks per node: one GPU each; without GPUs, one process each."""
    gradient_checkpoint: Literal["full", "none"] = "full"
    """Recompute each layer's activations in the backward pass, or keep them."""
    eps_clip_low_high: tuple[float, float] = (0.2, 0.2)
    """PPO and GSPO clip range: the ratio is kept within [1 - low, 1 + high]. CISPO: high is the ceiling of the ratio itself, at least 1."""
    loss_mode: str = "ppo"
    """Policy loss: ppo, cispo, gspo, reinforce, or a function of your own by path/to/file.py:name; docs/algorithms.md has the formulas."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the PPO loss at dual_clip times |advantage| where the advantage is negative. None: no bound."""
    ratio_base: Literal["trainer", "engine"] = "trainer"
    """The policy under the loss's ratio. trainer: its log-probs before the batch's first update, with the correction towards the engine
    beside it (decoupled PPO). engine: the log-probs of sampling, so that the clip is the only correction."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "segment_mean", "prompt_mean", "constant"] = "token_mean"
    """What counts the same in the loss of an optimizer step: each token, each rollout, each segment, each prompt; constant: each token, over
    loss_length tokens a rollout whatever its length (Dr. GRPO)."""
    loss_length: int = Field(default=2048, ge=1)
    """Tokens that a rollout counts as in the constant aggregation: the budget of its replies."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, aggregated as the loss is."""
    negative_token_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of a rollout's tokens with negative advantage that the policy loss keeps: those of the highest entropy. What is left out counts in
    the loss's normaliser. 1: all (FlashREINFORCE)."""
    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing term of a mixture of experts, over all tokens of an optimizer step; above 0 each step counts the
    assignments first, by a forward pass more. 0: none."""
    adam: AdamConfig = AdamConfig()
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over train.max_steps or the whole run."""
    lr_warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the optimizer steps over which the rate rises from zero."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Floor of the decay, as a share of the peak rate."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping: global L2 norm."""
    freezing_steps: int = Field(default=0, ge=0)
    """Rollout batches at the start in which only the critic trains (gae)."""


class RanksConfig(Section):
    num_nodes: int = Field(default=1, ge=1)
    """Nodes that hold ranks of this role."""
    num_gpus_per_node: int = Field(default=1, ge=1)
    """Its ranks per node."""
    tp_size: int = Field(default=1, ge=1)
    """Tensor-parallel ranks among them."""


class RefConfig(RanksConfig):
    """The reference or teacher: ranks of their own, there only when algo.kl.init_coef is above 0. They compute as the trainer does."""

    model_name_or_path: str = ""
    """Frozen policy that the KL is measured against. Empty: the actor's model as it is at the start of the run; a teacher must be named."""


class CriticConfig(RanksConfig):
    """The critic of --algo.advantage.estimator gae, on ranks of its own. Its schedule, clipping of gradients and layout are the actor's."""

    model_name_or_path: str = ""
    """Model under the value head. Empty: the actor's."""
    adam: AdamConfig = AdamConfig(lr=5e-6)
    value_clip: float | None = Field(default=0.2, gt=0)
    """Keeps the trained value within so much of the one before the batch. None: plain squared error."""
    max_epochs: int | None = Field(default=None, ge=1)
    """Passes over each rollout batch. None: train.max_epochs."""


class FsdpConfig(Section):
    tp_size: int = Field(default=1, ge=1)
    """Tensor-parallel ranks within the trainer's world."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; masters are fp32. auto: bf16 on GPU, fp32 on CPU (8 to 10 times faster there than bf16)."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto: flash_attention_2 where it is installed on a GPU, else sdpa."""
    packing_samples: bool = False
    """Put a microbatch's segments into one row with restarting positions instead of padding them."""
    share_prefix: bool = False
    """Forward what segments of a group have in common before their first sampled token, mostly the prompt, once and not for each.
    Exact. Segments lie in one row as with packing_samples. A group stays together unless it does not fit into max_tokens_per_gpu or
    would leave other ranks idle. Needs sdpa attention over whole contexts: flash attention and sliding windows are refused."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """torch.distributed backend. auto: nccl on GPU, gloo on CPU."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of every collective, seconds."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of a trainer rank that computes on the CPU. More than the cores that engines leave idle slow both down."""

    @property
    def layout(self) -> Literal["padded", "packed", "shared"]:
        """How a microbatch's segments lie in its rows."""
        return "shared" if self.share_prefix else "packed" if self.packing_samples else "padded"


class CkptConfig(Section):
    output_dir: str = ""
    """Folder of the final Hugging Face export. Empty: <run.dir>/model."""
    path: str = ""
    """Folder of resumable checkpoints. Empty: <run.dir>/checkpoints."""
    save_steps: int = -1
    """Save a checkpoint every so many steps; -1 never."""
    max_num: int = 3
    """Complete checkpoints to keep; 0 or less keeps all."""
    load_enable: bool = False
    """Resume from the newest intact checkpoint in ckpt.path."""
    load_best: bool = False
    """Load the best checkpoint instead of the newest."""
    best_metric_key: str = ""
    """Number of an evaluation, such as eval/pass1: the checkpoint of the weights that did best by it is kept beside the newest. Each evaluation
    then begins with a checkpoint of the weights that it evaluates. Empty: none."""
    disable_final_save: bool = False
    """Skip the final export."""


class DataConfig(Section):
    prompt_dataset: str = ""
    """A .jsonl, .parquet or .csv file (or folder of Parquet files), one prompt a row; this or data.tasks."""
    tasks: JsonDict = Field(default_factory=dict)
    """Prompts made by families of reasoning-gym: name to options of the family, and its `weight` in the mixture (docs/tasks.md)."""
    task_size: int = Field(default=2000, ge=1)
    """Prompts that data.tasks makes, no two alike."""
    task_seed: int = 0
    """Seed of data.tasks."""
    prompt_template: str = "{question}"
    """Text around each prompt that is a string, such as a few-shot header: '{question}\\nAnswer:'."""
    apply_chat_template: bool = True
    """Off: the model gets a text prompt as it is, and what an Env answers must be RawText; not for a ChatAgent."""
    input_key: str = "input"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Column handed to the agent as its label."""
    tools_key: str | None = None
    """Column with a list of OpenAI tool schemas."""
    image_key: str | None = None
    """Column with the prompt's images: one or a list of data URIs, encoded bytes, http(s) URLs (see capture.image_hosts), or paths from the
    data set's folder. They fill the prompt's bare parts {"type": "image"}, or go ahead of the text of its last user message."""
    max_len: int = Field(default=2048, ge=8)
    """Context budget in tokens: prompt, replies and observations together (the engine's max_model_len)."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first so many rows."""
    skip_bad_rows: bool = False
    """Count and skip rows that cannot be read, instead of refusing the data set."""


class RewardConfig(Section):
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before the estimator."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Weight of the length penalty: it rises over the last overlong_buffer tokens before overlong_length, to its full weight there."""
    overlong_length: int = Field(default=0, ge=0)
    """Sampled tokens of a rollout at which the length penalty is full."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before overlong_length over which the length penalty rises."""
    overlong_mask: bool = False
    """Do not train rollouts that were cut off by a length limit; their rewards still count in their group's baseline."""


class AdvantageConfig(Section):
    estimator: str = "reinforce"
    """reinforce, reinforce_baseline, rloo, grpo, dr_grpo, flash_reinforce, turn_credit, gae (with a critic), on_policy_distill (from
    ref.model_name_or_path), or a function of your own by path/to/file.py:name; docs/algorithms.md has the formulas,
    docs/write_an_estimator.md an example."""
    token_estimator: str = ""
    """The second stage, advantages of tokens from values of rollouts: one of the estimator's names or path/to/file.py:name. Empty: the
    estimator's own; for one by path the value at each token, whitened."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token (reinforce, gae) or per turn (turn_credit)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Decay of the temporal differences in gae: 1 trusts the returns, 0 the critic."""
    no_whiten: bool = False
    """Do not whiten advantages over the batch (reinforce, reinforce_baseline, turn_credit, gae, estimators by path)."""
    is_correction_level: Literal["auto", "off", "token", "seq", "geo", "binary_kl"] = "auto"
    """Importance correction between engine and trainer, w = trainer / engine: by each token's w, by their product or geometric mean over
    the rollout, or by the rollout's mean binary divergence (FlashREINFORCE). auto: token when tokens may be stale, else off."""
    is_correction_mode: Literal["trunc", "clip", "mask"] = "trunc"
    """trunc: min(level's value, high); clip: kept in the band; mask: the token's w inside the band, zero outside."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Band (low, high) of the level's value; for binary_kl (0, the largest divergence)."""


class KlConfig(Section):
    init_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL to the reference. None: 0, which means no reference at all; 1 for on_policy_distill."""
    use_loss: bool = False
    """Add the KL to the loss instead of taking it from the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL per token. In the reward k1 is the usual one; in the loss k2 has the gradient of the KL and k3 GRPO's form."""
    target: float | None = Field(default=None, gt=0)
    """Adapt the weight so that the mean KL per token comes to this. None: fixed."""
    horizon: int = Field(default=10000, ge=1)
    """Rollouts over which the adaptive weight moves."""


class AlgoConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    kl: KlConfig = KlConfig()
    dynamic_filtering_enable: bool = False
    """Drop groups whose mean score is not inside dynamic_filtering_range; the next prompt takes the place of each."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """The open interval of mean scores that are kept."""
    group_filter: str = ""
    """A filter of your own by path/to/file.py:name: from the rows of a whole group the reason to drop it, or an empty string."""


class VllmConfig(Section):
    num_engines: int = Field(default=1, ge=1)
    """Engine replicas, or the fewest of them where max_engines is more."""
    max_engines: int | None = Field(default=None, ge=1)
    """Engine replicas at most: Serve adds one when requests wait or KV caches are full, and removes one when the others have room for all."""
    scale_up_s: float = Field(default=15.0, ge=0)
    """Seconds that the reason for one more engine must last."""
    scale_down_s: float = Field(default=120.0, ge=0)
    """Seconds that the reason for one fewer must last."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per engine."""
    dtype: str = "auto"
    """Engine dtype. auto: bfloat16 on GPU, float32 on CPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that the engine takes."""
    enforce_eager: bool = False
    """No CUDA graphs. Always on for CPU."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of each engine worker that computes on the CPU; see fsdp.cpu_threads."""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prefixes; dropped at each refit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests decoded together in one engine."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one engine step; None: vLLM decides."""
    sync_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Weight transfer to the engines. auto: nccl on GPU, gloo on CPU."""
    sync_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one refit, seconds."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Deadline for all engines to be up, seconds."""
    extra: JsonDict = Field(default_factory=dict)
    """Any other vLLM engine argument, by its AsyncEngineArgs name, as JSON or YAML."""


class CaptureConfig(Section):
    num_replicas: int = Field(default=1, ge=1)
    """Capture replicas."""
    host: str = "127.0.0.1"
    """Interface that the session port binds; agents on other machines or in containers need another one than loopback."""
    advertise_host: str = ""
    """Address in the URLs handed to agents. Empty: the bound interface, or the node's address if that is 0.0.0.0."""
    tool_call_parser: str = ""
    """vLLM tool-call parser of the model family; empty: tool calls stay text."""
    reasoning_parser: str = ""
    """vLLM reasoning parser of the model family; empty: reasoning stays text."""
    chat_template: str = ""
    """Path of a chat template instead of the model's own."""
    keep_thinking: bool = False
    """Keep sampled thinking in the context where the template would strip it from history, instead of a new segment."""
    train_abandoned: bool = True
    """Train branches that the rest of the rollout does not build on."""
    max_survivors: int = Field(default=1024, ge=1)
    """Ids that may be left to sample from after top-p, top-k or min-p. A turn in which more were left somewhere is not trained. The engine
    lists one more than so many log-probs for each token of such a turn."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which images given as http(s) URLs are fetched; data URIs need none. `*`: every host with public addresses only; one in a
    private network must be named."""
    max_body_mb: float = Field(default=64.0, gt=0)
    """A request of more megabytes is refused (413): 64 hold a million tokens of text and some twenty photographs."""
    lease_s: float = Field(default=60.0, gt=0)
    """A session whose worker is gone for so many seconds is reaped."""


class RolloutConfig(Section):
    batch_size: int = Field(default=128, ge=1)
    """Rollouts per training batch (groups times n_samples_per_prompt)."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Rollouts of one prompt: a group."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Cap on the tokens of one turn; None: what is left of data.max_len."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; agents may set another per turn, which the trainer then applies."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the engine lists what survives of each distribution, and the trainer renormalises over that
    (capture.max_survivors)."""
    num_runners: int = Field(default=1, ge=1)
    """Agent workers at start."""
    max_runners: int | None = Field(default=None, ge=1)
    """Agent workers at most; Serve scales between the two on groups in progress. None: num_runners."""
    groups_per_runner: int = Field(default=16, ge=1)
    """Groups in progress for which one worker is meant: the autoscaling target."""
    adapt_concurrency: bool = True
    """Fewer groups in flight while engines preempt, or requests wait for a full KV cache; as many as the slots allow while there is room."""
    blocking_processes: int = Field(default=16, ge=1)
    """Child processes per worker for blocking agents, each running one rollout at a time."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one rollout, seconds; then the agent is cancelled or killed."""
    partial_credit: bool = False
    """A rollout at its deadline ends as truncated, with the finished turns and the turn rewards that it has (a ChatAgent's reward is then 0),
    instead of failing and being tried again, in evaluations too. One without a finished turn fails all the same."""
    max_retries: int = Field(default=2, ge=0)
    """How often a failed rollout is tried again, and a group whose worker or engine was lost, before the prompt counts as failed."""

    def sampling(self) -> dict[str, Any]:
        """Settings that an agent's model calls start from, by vLLM name."""
        limit = {} if self.max_new_tokens is None else {"max_tokens": self.max_new_tokens}
        return {"temperature": self.temperature, "top_p": self.top_p, **limit}


class TrainConfig(Section):
    agent_path: str = ""
    """Python file that exports AgentRunner (required)."""
    agent_options: JsonDict = Field(default_factory=dict)
    """The agent's own options, by the fields of its AgentRunner.options_class."""
    batch_size: int | None = Field(default=None, ge=1)
    """Rollouts per optimizer step. None: the whole rollout batch in one step."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Segments per forward pass. None: bounded by max_tokens_per_gpu alone."""
    max_tokens_per_gpu: int = Field(default=16192, ge=1)
    """Tokens of one forward pass, padding included."""
    num_episodes: int = Field(default=1, ge=1)
    """Passes over the prompts."""
    max_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after so many rollout batches. None: when the prompts are used up."""
    target_reward: float | None = None
    """Stop early once the mean reward of ten steps reaches this."""
    max_staleness: int = Field(default=1, ge=0)
    """No token is trained more than so many policy versions behind; 0: strictly on-policy."""
    stale_groups: Literal["hold", "abort"] = "hold"
    """A group that reaches the bound holds the next refit, or is aborted and its prompt rolled out again."""
    rollout_only: bool = False
    """Sample batches as in training and train nothing: what generation can do here, in tokens a second."""
    partial_rollout_enable: bool = True
    """Refit under running requests (paused, then resumed on the new weights) instead of waiting for them."""
    seed: int = 42
    """Order of prompts, sampling seeds, trainer RNG."""


class EvalConfig(Section):
    dataset: str = ""
    """Held-out prompts, a file like data.prompt_dataset and with its columns. Empty: no evaluation."""
    datasets: JsonDict = Field(default_factory=dict)
    """Several files of held-out prompts instead, by a name that their scores carry: eval/NAME/pass1 beside eval/pass1 over all."""
    task_size: int = Field(default=0, ge=0)
    """Held-out prompts that data.tasks makes beside those of the training, none of which they repeat. 0: no evaluation."""
    task_seed: int = 1
    """Seed of the held-out prompts of data.tasks."""
    steps: int = -1
    """Evaluate after every so many steps, and after the last; -1 only at start and end."""
    eval_at_start: bool = True
    """Evaluate before the first step too."""
    num_engines: int = Field(default=0, ge=0)
    """Engines kept for evaluations beside training, with agent workers and capture replicas of their own: then only the refit before the next evaluation
    waits for one. 0: they share the training's engines, and each refit waits."""
    refit_wait_s: float | None = Field(default=None, gt=0)
    """A refit waits for an evaluation at most so many seconds after its batch was trained; then the evaluation is dropped and counted
    (eval/dropped). None: until it is finished."""
    batch_size: int | None = Field(default=None, ge=1)
    """Rollouts of the evaluation in progress at once. None: rollout.batch_size."""
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Rollouts of each held-out prompt: pass1 is their mean score, pass<k> the expected best of k of them."""
    temperature: float | None = Field(default=None, ge=0)
    """None: rollout.temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """None: rollout.top_p."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """None: rollout.max_new_tokens."""

    def due(self, step: int) -> bool:
        """Whether an evaluation follows training step `step`."""
        return self.steps > 0 and step % self.steps == 0

    def groups_in_flight(self, rollout: RolloutConfig) -> int:
        return max(1, (self.batch_size or rollout.batch_size) // self.n_samples_per_prompt)

    def sampling(self, rollout: RolloutConfig) -> dict[str, Any]:
        """Settings of the evaluation's model calls; what is not set here is as in training."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_new_tokens}
        return rollout.sampling() | {name: value for name, value in given.items() if value is not None}


class RunConfig(Section):
    name: str = Field(default="molt", pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the run, in letters, digits, - and _: prefix of its Serve applications and of its actors in the dashboard."""
    dir: str = ""
    """Folder for metrics, curve, checkpoints and export. A relative path is taken from the caller's folder. Empty: runs/<name>."""
    record: bool = False
    """Write every trained rollout to <run.dir>/rollouts as Parquet."""
    restart_limit: int = Field(default=3, ge=0)
    """How often in a row, without a new step, ranks that died are started again from the last checkpoint."""
    fail_limit: int = Field(default=8, ge=1)
    """Stop with the reason when so many groups failed in a row and none finished."""


class Config(Section):
    """Train a language-model agent with reinforcement learning."""

    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    fsdp: FsdpConfig = FsdpConfig()
    ckpt: CkptConfig = CkptConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    vllm: VllmConfig = VllmConfig()
    capture: CaptureConfig = CaptureConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.actor.num_nodes * self.actor.num_gpus_per_node

    @property
    def kl_coef(self) -> float:
        """`algo.kl.init_coef` with None decided."""
        given = self.algo.kl.init_coef
        return given if given is not None else float(self.algo.advantage.estimator == "on_policy_distill")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.algo.advantage.estimator == "gae"

    def of_reference(self) -> Config:
        """This configuration as the reference's ranks see it: their model and size in the actor's place."""
        return self.with_role(self.ref, {})

    def of_critic(self) -> Config:
        """This configuration as the critic's ranks see it, with its optimizer, epochs and checkpoints."""
        config = self.with_role(self.critic, {"adam": self.critic.adam})
        train = config.train.model_copy(update={"max_epochs": self.critic.max_epochs or self.train.max_epochs})
        ckpt = config.ckpt.model_copy(update={"path": f"{self.ckpt.path}-critic"})
        packed = self.fsdp.layout != "padded"  # of shared prefixes only the policy knows
        fsdp = config.fsdp.model_copy(update={"share_prefix": False, "packing_samples": packed})
        return config.model_copy(update={"train": train, "ckpt": ckpt, "fsdp": fsdp})

    def with_role(self, role: RefConfig | CriticConfig, changes: dict[str, Any]) -> Config:
        model = role.model_name_or_path or self.actor.model_name_or_path
        size = {"num_nodes": role.num_nodes, "num_gpus_per_node": role.num_gpus_per_node}
        actor = self.actor.model_copy(update={"model_name_or_path": model, **size, **changes})
        return self.model_copy(update={"actor": actor, "fsdp": self.fsdp.model_copy(update={"tp_size": role.tp_size})})

    @property
    def groups_per_batch(self) -> int:
        """Prompt groups in one rollout batch."""
        return self.rollout.batch_size // self.rollout.n_samples_per_prompt

    @property
    def correction_level(self) -> Literal["off", "token", "seq", "geo", "binary_kl"]:
        """`algo.advantage.is_correction_level` with auto decided: token when a token may be older than the trainer and nothing else
        corrects that."""
        level = self.algo.advantage.is_correction_level
        if level == "auto":
            return "token" if self.train.max_staleness > 0 and self.actor.ratio_base == "trainer" else "off"
        return level


def refuse(option: str, value: object, remedy: str) -> None:
    raise ConfigError(f"--{option} {value!r}: {remedy}")
