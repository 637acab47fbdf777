"""The whole configuration as one typed tree. Importing it loads neither torch, ray nor transformers."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from megarl import config_file
from megarl.config_checks import check, violations
from megarl.config_errors import covers, validate
from megarl.errors import ConfigError
from megarl.machine import resolve_device

__all__ = ["Config", "check", "describe", "load"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


class ToyConfig(Section):
    """Write the toy model, tokenizer and word problems of `megarl.data.toy` before the run, unless they are there."""

    folder: str = Field("runs/toy", description="receives model/, train.jsonl, validation.jsonl, warm_start.jsonl")
    seed: int = 0


class ModelConfig(Section):
    path: str = Field(description="Hugging Face folder: config.json, safetensors, tokenizer")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    transformer_impl: Literal["auto", "transformer_engine", "local"] = Field(
        "auto", description="layers of transformer-engine, or our own on torch; auto: the former where it imports"
    )


class DataConfig(Section):
    train: str = Field(description="JSONL file of prompts")
    validation: str | None = Field(None, description="JSONL file of held-out prompts")
    prompt_key: str = Field("prompt", description="column with the user's text, or with a list of messages")
    answer_key: str | None = Field("answer", description="column with the reference answer; null: none")
    system_prompt: str | None = None
    max_prompt_tokens: int = Field(1024, ge=1, description="templated length; longer prompts are dropped, with a count")


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
    """A short supervised start on worked answers, by the same engine: the usual remedy for all-zero rewards."""

    data: str | None = Field(None, description="JSONL with `prompt_key` and `response`; null: no warm start")
    steps: int = Field(600, ge=1)
    batch_size: int = Field(64, ge=1, description="in samples")
    optimizer: WarmStartOptimizerConfig = WarmStartOptimizerConfig()


class OffPolicyConfig(Section):
    """Correction for what the server's log-probs and the trainer's differ by: `megarl.algorithms.off_policy`."""

    kind: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geometric"] = "token_tis"
    low: float = Field(0.0, ge=0, le=1, description="smallest ratio trainer / server that is taken as it is; 0: none")
    high: float = Field(2.0, ge=1, description="largest one")
    veto: float | None = Field(None, gt=0, lt=1, description="a token of a smaller ratio takes its sequence out; null: none")


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = Field(
        "grpo", description="from rewards to advantages: megarl.algorithms.ADVANTAGES"
    )
    prompts_per_step: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1, description="responses per prompt")
    mini_batch_size: int | None = Field(None, ge=1, description="samples per optimizer step; null: all of a step")
    normalize_by_std: bool = Field(True, description="divide by the group's unbiased standard deviation")
    clip_low: float = Field(0.2, ge=0, le=1, description="1: the lower side is open, as in CISPO's paper")
    clip_high: float = Field(0.2, ge=0)
    policy_loss: Literal["ppo", "dual_clip", "gspo", "cispo", "sapo"] = Field(
        "ppo", description="megarl.algorithms.policy_losses"
    )
    dual_clip: float = Field(3.0, gt=1, description="of policy_loss: dual_clip: bound of a negative advantage's ratio")
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"] = "sequence_mean"
    aggregation_length: int | None = Field(
        None, ge=1, description="of loss_aggregation: constant, in tokens; null: rollout.sampling.max_new_tokens"
    )
    off_policy: OffPolicyConfig | None = Field(None, description="null: none")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of KL(policy || reference) in the loss")
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = Field("k3", description="megarl.algorithms.kl")
    kl_importance_weighted: bool = Field(False, description="times the policy's ratio: unbiased for k1 and k3")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the policy's entropy, which the loss then rewards")
    reward: str = Field("gsm8k", description="a name in megarl.rewards.REWARDS")

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def samples_per_update(self) -> int:
        return self.mini_batch_size or self.samples_per_step


Phase = Literal["generate", "score", "update"]  # of an iteration, by what a role holds on its GPUs meanwhile


class RoleConfig(Section):
    """Layout and memory of one Megatron role; every role has its own."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(1, ge=1, description="ranks per node; on CPU: processes")
    tensor_parallel: int = Field(1, ge=1)
    tensor_parallel_across_nodes: bool = Field(False, description="let a TP group fill several nodes, over their network")
    sequence_parallel: bool = Field(False, description="split norms and their activations over the TP ranks too")
    pipeline_parallel: int = Field(1, ge=1)
    virtual_pipeline_parallel: int = Field(1, ge=1, description="model chunks per pipeline rank: > 1 interleaves them")
    context_parallel: int = Field(1, ge=1, description="ranks that share each sequence; GPU with transformer-engine")
    expert_parallel: int = Field(1, ge=1, description="ranks that share a layer's experts")
    expert_tensor_parallel: int = Field(1, ge=1, description="ranks that split each expert's matrices")
    overlap_grad_reduce: bool = Field(True, description="reduce gradients while the backward pass goes on")
    max_tokens_per_gpu: int = Field(8192, ge=1, description="token budget of a packed micro-batch, per CP rank")
    balance: Literal["tokens", "flops"] = Field("flops", description="what is made equal over data-parallel ranks")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations to compute again in the backward pass: none, recompute_modules, whole layers"
    )
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = Field(
        None, min_length=1, description="of `selective`; null: mlp, or moe where the model has experts"
    )
    offload: Literal["none", "optimizer", "all"] | None = Field(
        None,
        description="to host memory: the optimizer and gradients outside of updates; all: weights too while generating; "
        "null: all where servers share the GPUs, else none",
    )
    cpus_per_rank: float | None = Field(None, gt=0, description="null: 0.5 on CPU, 1 on GPU")
    optimizer: OptimizerConfig = OptimizerConfig()

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


class CriticConfig(RoleConfig):
    """A model of its own with one value per token in place of the logits."""

    value_head_std: float = Field(0.001, ge=0, description="of the head's initial weights, drawn from a normal distribution")
    value_head_bias: bool = Field(True, description="a bias, initially 0")


class ReferenceConfig(Section):
    enabled: bool = Field(True, description="log kl/ref; needed where algorithm.kl_coefficient > 0")


class RolesConfig(Section):
    actor: RoleConfig = RoleConfig()
    critic: CriticConfig | None = Field(None, description="null: none")
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def megatron(self) -> dict[str, RoleConfig]:
        """The roles that are Megatron engines of their own."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(512, ge=1)


class RolloutConfig(Section):
    servers: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1, description="ranks of one server")
    ports: list[int] | None = Field(None, description="one port per server; null: free ones are found")
    cpus_per_server: float = Field(1.0, gt=0)
    sampling: SamplingConfig = SamplingConfig()
    server_args: dict[str, Any] = Field({}, description="passed through to SGLang: {mem_fraction_static: 0.8}")
    start_timeout_s: float = Field(300.0, gt=0)
    max_restarts: int = Field(3, ge=0, description="incidents in a run: a server that dies, or those that hang in one push; one more ends it")
    request_timeout_s: float = Field(600.0, gt=0)
    max_retries: int = Field(3, ge=0, description="of one request, before the run stops")
    max_concurrent_prompts: int = Field(512, ge=1)
    logprob_diff_limit: float | None = Field(
        None, gt=0, description="above it rollout/logprob_diff_mean stops the run; null: by dtype, 1e-4 or 0.05"
    )


class SyncConfig(Section):
    bucket_mb: int = Field(1024, ge=1, description="size of a bucket of weights, in MiB; sender and server hold two")
    timeout_s: float = Field(60.0, gt=0, description="for one bucket, joining a group, a pause, the canary, or giving memory back and taking it")
    canary_diff_limit: float | None = Field(
        None, gt=0, description="above it sync/canary_diff stops the run; null: by dtype, 1e-4 or 0.25"
    )


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    evaluate_every: int = Field(0, ge=0, description="in steps; 0: only before and after, if data.validation is set")
    evaluate_prompts: int = Field(256, ge=1, description="at most so many held-out prompts")
    save_every: int = Field(0, ge=0, description="in steps; 0: only at the end")
    save_on_interrupt: bool = Field(False, description="after Ctrl-C or SIGTERM; a second one ends the saving")
    max_skipped_updates: int = Field(
        10, ge=0, description="in a run, for a loss, log-prob or gradient that is not finite; one more stops it"
    )
    num_logged_samples: int = Field(4, ge=0, description="per step, into samples.jsonl")


class ClusterConfig(Section):
    ray_address: str | None = Field(None, description="HOST:PORT of a running cluster, or auto for this node's; null: a local one for this run")
    placement_timeout_s: float = Field(120.0, gt=0, description="to wait for room where the cluster is full")
    start_timeout_s: float = Field(300.0, gt=0, description="for all ranks of a role to be ready")
    call_timeout_s: float = Field(1800.0, gt=0, description="for one call on all ranks")


class DebugConfig(Section):
    sync_checksum: bool = Field(False, description="compare every tensor after a sync; on GPUs, and slow")
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
    roles: RolesConfig = RolesConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def run_path(self) -> Path:
        return Path(self.run_directory) / self.name


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The config of a YAML file with `key.path=value` overrides applied.

    Raises ConfigError listing all violations found, each with its file:line or override: of the file's form, of the
    schema, and across keys (`check`; those that rest on a key which is itself in error are left out).
    """
    document = config_file.read(path, overrides)
    if "name" not in document.tree:
        document.tree["name"] = Path(path).stem
    config = validate(Config, document)
    for violation in violations(config):
        if not any(covers(document.doubtful, key) for key in violation.keys):
            document.problems.append(document.line(violation.text, *violation.keys))
    if document.problems:
        count = len(document.problems)
        header = [f"{count} problems in the configuration:"] if count > 1 else []
        raise ConfigError("\n".join(header + document.problems))
    return config


def describe(config: Config) -> str:
    """The resolved config as YAML that `load` reads back, followed by the numbers that result from it as comments."""
    algorithm, actor, rollout = config.algorithm, config.roles.actor, config.rollout
    device = resolve_device(config)
    gpus = int(device == "cuda")  # per rank
    sequence = config.data.max_prompt_tokens + rollout.sampling.max_new_tokens
    updates = algorithm.samples_per_step // algorithm.samples_per_update
    rows = []
    for name, role in config.roles.megatron.items():
        cpus = role.world_size * role.rank_cpus(device)
        rows.append((name, f"{role.nodes} x {role.gpus_per_node} ranks", role.world_size * gpus, cpus))
    own_gpus = gpus if config.placement == "disaggregated" else 0
    server_gpus, server_cpus = rollout.servers * rollout.tensor_parallel * own_gpus, rollout.servers * rollout.cpus_per_server
    rows.append(("rollout", f"{rollout.servers} x {rollout.tensor_parallel} ranks", server_gpus, server_cpus))
    rows.append(("needed", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    derived = f"""
device              {device}
data parallel size  {actor.data_parallel} ({actor.sizes})
samples per step    {algorithm.samples_per_step} ({algorithm.prompts_per_step} prompts x {algorithm.group_size})
updates per step    {updates} (of {algorithm.samples_per_update} samples)
tokens per step     at most {algorithm.samples_per_step * sequence:,} ({sequence:,} per sample)

role      layout            GPUs   CPUs
"""
    derived += "\n".join(f"{name:9} {layout:16} {gpus:5} {cpus:6g}" for name, layout, gpus, cpus in rows)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text + "\n".join(f"# {line}".rstrip() for line in derived.strip().splitlines()) + "\n"
