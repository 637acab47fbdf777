"""The whole configuration as one typed tree. Importing it loads neither torch, ray nor transformers."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from megarl import config_file
from megarl.config_algorithm import AlgorithmConfig
from megarl.config_checkpoint import CheckpointConfig, EarlyStopConfig
from megarl.config_checks import check, violations
from megarl.config_data import DataConfig
from megarl.config_describe import describe
from megarl.config_errors import covers, validate
from megarl.config_evaluation import EvaluationConfig
from megarl.config_guards import GuardsConfig
from megarl.config_lora import LoraConfig
from megarl.config_monitor import MonitorConfig
from megarl.config_rewards import RewardsConfig
from megarl.config_section import Section
from megarl.errors import ConfigError

__all__ = ["Config", "check", "describe", "load"]


class ToyConfig(Section):
    """Write the toy model, tokenizer and word problems of `megarl.data.toy` before the run, unless they are there."""

    folder: str = Field(
        "runs/toy",
        description="receives model/ and JSONL files: train, validation, warm_start, preferences and "
        "preferences_validation",
    )
    seed: int = 0


class ModelConfig(Section):
    path: str = Field(description="Hugging Face folder: config.json, safetensors, tokenizer")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    transformer_impl: Literal["auto", "transformer_engine", "local"] = Field(
        "auto", description="layers of transformer-engine, or our own on torch; auto: the former where it imports"
    )


class OptimizerConfig(Section):
    """AdamW and its rate. Steps are those of the loop (`trainer.steps`, `warm_start.steps`), not optimizer updates."""

    learning_rate: float = Field(1e-6, gt=0, description="the peak")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="a YAML list")
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, gt=0, description="bound of the global gradient norm")
    warmup_steps: int = Field(0, ge=0, description="steps over which the rate rises linearly to the peak")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="how the rate falls")
    decay_from: float = Field(0.0, ge=0, le=1, description="share of the steps after which it falls")
    final_fraction: float = Field(0.1, ge=0, le=1, description="rate at the last step, as a share of the peak")


class WarmStartOptimizerConfig(OptimizerConfig):
    """The same keys with the defaults of a supervised start."""

    learning_rate: float = Field(6e-3, gt=0, description="the peak")
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(30, ge=0, description="steps over which the rate rises linearly to the peak")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="how the rate falls")
    decay_from: float = Field(0.5, ge=0, le=1, description="share of the steps after which it falls")


class WarmStartConfig(Section):
    """A short supervised start on worked responses, by the same engine: the usual remedy for all-zero rewards."""

    data: str | None = Field(
        None, description="JSONL or Parquet file with data.prompt_key and data.response_key; null: no warm start"
    )
    steps: int = Field(600, ge=1)
    batch_size: int = Field(64, ge=1, description="in samples")
    optimizer: WarmStartOptimizerConfig = WarmStartOptimizerConfig()


Phase = Literal["generate", "score", "update"]  # of an iteration, by what a role holds on its GPUs meanwhile


class LayoutConfig(Section):
    """How a Megatron role is spread over ranks; every role has its own layout."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(1, ge=1, description="ranks per node; on CPU: processes")
    tensor_parallel: int = Field(1, ge=1)
    tensor_parallel_across_nodes: bool = Field(
        False, description="let a TP group fill several nodes, over their network"
    )
    sequence_parallel: bool = Field(False, description="split norms and their activations over the TP ranks too")
    pipeline_parallel: int = Field(1, ge=1)
    virtual_pipeline_parallel: int = Field(1, ge=1, description="model chunks per pipeline rank: > 1 interleaves them")
    context_parallel: int = Field(1, ge=1, description="ranks that share each sequence; GPU with transformer-engine")
    expert_parallel: int = Field(1, ge=1, description="ranks that share a layer's experts")
    expert_tensor_parallel: int = Field(1, ge=1, description="ranks that split each expert's matrices")
    max_tokens_per_gpu: int = Field(8192, ge=1, description="token budget of a packed micro-batch, per CP rank")
    balance: Literal["tokens", "flops"] = Field("flops", description="what is made equal over data-parallel ranks")
    cpus_per_rank: float | None = Field(None, gt=0, description="null: 0.5 on CPU, 1 on GPU")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def model_parallel(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.model_parallel

    def rank_cpus(self, device: str) -> float:
        return self.cpus_per_rank or (0.5 if device == "cpu" else 1.0)

    @property
    def sizes(self) -> str:
        """What data_parallel results from."""
        parts = {"tensor": self.tensor_parallel, "context": self.context_parallel, "pipeline": self.pipeline_parallel}
        return f"world {self.world_size}" + "".join(f" / {name} {size}" for name, size in parts.items())


class RoleConfig(LayoutConfig):
    """Layout, memory and optimizer of a Megatron role that is trained."""

    overlap_grad_reduce: bool = Field(True, description="reduce gradients while the backward pass goes on")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations to compute again in the backward pass: none, recompute_modules, whole layers"
    )
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = Field(
        None, min_length=1, description="of `selective`; null: mlp, or moe where the model has experts"
    )
    offload: Literal["none", "optimizer", "all"] | None = Field(
        None,
        description="to host memory: the optimizer and gradients outside of updates; all: weights too while "
        "generating; null: all where servers share the GPUs, else none. What stays on a shared GPU must fit beside what "
        "rollout.server_args.mem_fraction_static gives the servers",
    )
    host_optimizer: bool = Field(
        False,
        description="master weights and moments in host memory: 12 bytes per parameter that pass through the GPU in each "
        "update instead of staying there",
    )
    lora: LoraConfig | None = Field(None, description="null: all weights are trained")
    optimizer: OptimizerConfig = OptimizerConfig()


class CriticConfig(RoleConfig):
    """A model of its own with one value per token in place of the logits."""

    path: str | None = Field(
        None,
        description="Hugging Face folder that it starts from, e.g. an exported reward model; null: model.path, as it "
        "is before a warm start",
    )
    value_head_std: float = Field(
        0.001, ge=0, description="of the head's initial weights, drawn from a normal distribution"
    )
    value_head_bias: bool = Field(True, description="a bias, initially 0")


class ReferenceConfig(Section):
    enabled: bool = Field(True, description="log kl/ref; needed for dpo and ipo and where algorithm.kl_coefficient > 0")
    refresh_every: int = Field(0, ge=0, description="steps after which the policy becomes the reference; 0: never")
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="at a refresh the reference keeps this share of itself: an average; null: nothing"
    )


class ServersConfig(Section):
    """SGLang servers of one model."""

    servers: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1, description="ranks of one server")
    ports: list[int] | None = Field(None, description="one port per server; null: free ones are found")
    cpus_per_server: float = Field(1.0, gt=0)
    server_args: dict[str, Any] = Field({}, description="passed through to SGLang: {mem_fraction_static: 0.8}")
    start_timeout_s: float = Field(300.0, gt=0)


class TeacherConfig(ServersConfig):
    """A served model whose log-probs `algorithm.name: distillation` trains towards; it has the policy's tokenizer."""

    path: str = Field(description="Hugging Face folder")


class RewardModelConfig(LayoutConfig):
    """A Megatron engine that scores for the reward `model`: an exported reward model, on GPUs of its own, as it is."""

    path: str = Field(description="Hugging Face folder of a sequence classifier with one score")


class RewardServerConfig(ServersConfig):
    """The same served by SGLang, in model.dtype: in bfloat16 a score has three digits, and near ones are equal."""

    path: str = Field(description="Hugging Face folder of a sequence classifier with one score")


class RolesConfig(Section):
    actor: RoleConfig = RoleConfig()
    critic: CriticConfig | None = Field(None, description="null: none")
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = Field(None, description="null: none")
    reward_model: RewardModelConfig | None = Field(None, description="null: none")
    reward_server: RewardServerConfig | None = Field(None, description="null: none")

    @property
    def megatron(self) -> dict[str, LayoutConfig]:
        """The roles that are Megatron engines of their own."""
        roles = {"actor": self.actor, "critic": self.critic, "reward_model": self.reward_model}
        return {name: role for name, role in roles.items() if role is not None}

    @property
    def trained(self) -> dict[str, RoleConfig]:
        """Those of them that are trained."""
        return {name: role for name, role in self.megatron.items() if isinstance(role, RoleConfig)}


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(512, ge=1)
    ignore_eos: bool = Field(
        False,
        description="go on to max_new_tokens behind the token that ends a turn: responses of one length, for speed",
    )


class RolloutConfig(ServersConfig):
    """The servers that generate with the policy."""

    sampling: SamplingConfig = SamplingConfig()
    max_restarts: int = Field(
        3,
        ge=0,
        description="incidents in a run: a server that dies, or those that hang in one push; one more ends it",
    )
    request_timeout_s: float = Field(600.0, gt=0)
    max_retries: int = Field(3, ge=0, description="of one request, before the run stops")
    max_concurrent_prompts: int = Field(512, ge=1)
    deterministic: bool = Field(
        False,
        description="equal weights, prompts and seed give equal samples: a seed per sample and batch-invariant kernels; "
        "on GPUs only, slower",
    )
    save: str | None = Field(None, description="folder that keeps what is generated for each step; null: none")
    replay: str | None = Field(None, description="such a folder to train on again, without servers; null: none")
    logprob_diff_limit: float | None = Field(
        None, gt=0, description="above it rollout/logprob_diff_mean stops the run; null: by dtype, 1e-4 or 0.05"
    )


class SyncConfig(Section):
    bucket_mb: int = Field(1024, ge=1, description="size of a bucket of weights, in MiB; sender and server hold two")
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="for one bucket, joining a group, a pause, the canary, or giving memory back and taking it",
    )
    canary_diff_limit: float | None = Field(
        None, gt=0, description="above it sync/canary_diff stops the run; null: by dtype, 1e-4 or 0.25"
    )


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    evaluate_every: int = Field(0, ge=0, description="in steps; 0: only before and after, if data.validation is set")
    evaluate_prompts: int = Field(256, ge=1, description="at most so many held-out prompts")
    early_stop: EarlyStopConfig | None = Field(None, description="null: never; else evaluate_every is needed")
    save_every: int = Field(0, ge=0, description="in steps; 0: only at the end")
    max_skipped_updates: int = Field(
        10, ge=0, description="in a run, for a loss, log-prob or gradient that is not finite; one more stops it"
    )
    num_logged_samples: int | None = Field(4, ge=0, description="per step, into samples.jsonl; null: all")

    def is_due(self, step: int, every: int) -> bool:
        """What is done every so many steps is done after the last one too."""
        return step == self.steps or (every > 0 and step % every == 0)


class ClusterConfig(Section):
    ray_address: str | None = Field(
        None, description="HOST:PORT of a running cluster, or auto for this node's; null: a local one for this run"
    )
    placement_timeout_s: float = Field(120.0, gt=0, description="to wait for room where the cluster is full")
    start_timeout_s: float = Field(300.0, gt=0, description="for all ranks of a role to be ready")
    call_timeout_s: float = Field(1800.0, gt=0, description="for one call on all ranks")


class DebugConfig(Section):
    sync_checksum: bool = Field(False, description="compare every tensor after a sync; on GPUs, and slow")
    generate_only: bool = Field(
        False, description="generate and score with model.path as it is, train nothing; rollout.save keeps the samples"
    )
    shuffle_rewards: bool = Field(False, description="permute the rewards of a step: a control that must not learn")


class Config(Section):
    name: str = Field(description="of the run; the file's name without suffix if not given")
    run_directory: str = "runs"
    seed: int = Field(1, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    placement: Literal["disaggregated", "colocated"] = Field(
        "disaggregated", description="servers on GPUs of their own, or on the actor's in turns"
    )
    toy: ToyConfig | None = None
    model: ModelConfig
    data: DataConfig
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: RewardsConfig = RewardsConfig()
    roles: RolesConfig = RolesConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    monitor: MonitorConfig = MonitorConfig()
    cluster: ClusterConfig = ClusterConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def run_path(self) -> Path:
        return Path(self.run_directory) / self.name

    @property
    def servers(self) -> dict[str, ServersConfig]:
        """The groups of servers that the run starts, by section."""
        if self.algorithm.is_supervised:
            return {}
        groups = {
            "rollout": None if self.rollout.replay else self.rollout,
            "roles.teacher": self.roles.teacher,
            "roles.reward_server": self.roles.reward_server,
        }
        return {section: group for section, group in groups.items() if group is not None}

    @property
    def aggregation_length(self) -> int:
        """Tokens, of `loss_aggregation: constant`."""
        return self.algorithm.aggregation_length or self.rollout.sampling.max_new_tokens

    @property
    def prompts_per_round(self) -> int:
        """Of generation: a step has one round, with dynamic sampling several."""
        sampling = self.algorithm.dynamic_sampling
        return (sampling.prompts_per_round if sampling else None) or self.algorithm.prompts_per_step

    @property
    def overlong_buffer_tokens(self) -> int:
        assert self.algorithm.overlong is not None, "algorithm.overlong is null"
        return self.algorithm.overlong.buffer_tokens or -(-self.rollout.sampling.max_new_tokens // 5)

    def model_of(self, role: str) -> ModelConfig:
        """The model that a role starts from."""
        path = getattr(getattr(self.roles, role), "path", None)
        return self.model.model_copy(update={"path": path}) if path else self.model


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = (), to_run: bool = True) -> Config:
    """The config of a YAML file with `key.path=value` overrides applied; without `to_run` one for another machine's GPUs
    is fine too.

    Raises ConfigError listing all violations found, each with its file:line or override: of the file's form, of the
    schema, and across keys (`check`; those that rest on a key which is itself in error are left out).
    """
    document = config_file.read(path, overrides)
    if "name" not in document.tree:
        document.tree["name"] = Path(path).stem
    config = validate(Config, document)
    for violation in violations(config, to_run):
        if not any(covers(document.doubtful, key) for key in violation.keys):
            document.problems.append(document.line(violation.text, *violation.keys))
    if document.problems:
        count = len(document.problems)
        header = [f"{count} problems in the configuration:"] if count > 1 else []
        raise ConfigError("\n".join(header + document.problems))
    return config
