"""Which commands of the READMEs tests/test_readme.py runs, with what, and which tests run the others."""

# What stands for a placeholder, and where in one command something else does.
FILLED = {
    "CONFIG": "configs/quickstart.yaml",
    "NAME": "longer",
    "RUN_OR_CKPT": "runs/longer",
    "HF_FOLDER": "exported",
    "HF_OR_CKPT": "exported",
    "MODEL_A": "exported",
    "MODEL_B": "exported",
    "OUT": "out",
    "RUN_ID": "longer-20260101-000000-abcdef",
    "HOST:PORT": "127.0.0.1:6379",
    "ADDRESS": "127.0.0.1:6379",
}
FILLED_IN = {
    "python benchmarks/NAME.py --help": {"NAME": "quickstart"},
    "megarl plot runs/NAME-seed1 runs/NAME-seed2": {"NAME": "three"},
    "megarl reward CONFIG --from-model 16": {"CONFIG": "my_reward.yaml"},
    "megarl data CONFIG": {"CONFIG": "my_data.yaml"},
    "megarl train CONFIG --dry-run": {"CONFIG": "my_data.yaml"},
}
SMALL = "warm_start.steps=40 trainer.steps=3 algorithm.prompts_per_step=4 data.validation=null"
MIDDLE = "warm_start.steps=200 algorithm.prompts_per_step=4 data.validation=null"
TRAINED = "model.path=exported"  # else it is the toy's start, which is right never

# What the soak runs, as it is written, and what it appends: arguments that make it shorter, or that fit the toy.
RUN_HERE = {
    "bash launch/quickstart.sh": "warm_start.steps=40 trainer.steps=3",
    "bash tests/run.sh": "tests/test_config_file.py",
    "source .venv/bin/activate": "",
    "megarl train configs/quickstart.yaml trainer.steps=100 seed=2 name=longer": MIDDLE,
    "megarl train configs/quickstart.yaml seed=2 name=longer trainer.steps=120 --resume auto": MIDDLE,
    "megarl train configs/quickstart.yaml name=three --seeds 1,2,3": SMALL,
    "megarl plot runs/three-seed1 runs/three-seed2 runs/three-seed3 --out curves.png": "",
    "tools/convert_ckpt.py --to-hf runs/longer exported --verify": "",
    "megarl eval configs/quickstart.yaml name=longer": "",
    "megarl train configs/grpo_qwen2.5_7b_8gpu_colocated.yaml --dry-run": "",
    "python benchmarks/NAME.py --help": "",
    "megarl reward CONFIG --from-model 16": f"{TRAINED} algorithm.reward.brevity.options.limit=4",
    "megarl data CONFIG": "",
    "megarl train CONFIG --dry-run": "",
    "python -m pytest tests/engine/test_parity.py tests/engine/test_hf_mapping.py -k mistral": "",
    'python -c "import sys, pandas; print(pandas.read_json(sys.argv[1], lines=True).filter(regex=sys.argv[2]).tail(20)'
    ".to_string())\" runs/NAME/metrics.jsonl '^step$|reward/mean|kl/ref'": "",
    "megarl plot runs/NAME": "",
    "megarl reward CONFIG": TRAINED,
    "megarl check CONFIG": "",
    "megarl reward CONFIG --from-model 64": TRAINED,
    "megarl eval CONFIG": "name=three-seed1 --max-prompts 8",
    "megarl reward CONFIG --samples runs/NAME/samples.jsonl": "",
    "megarl train CONFIG --resume auto": f"name=three-seed1 {SMALL}",
    "megarl train configs/grpo_qwen2.5_7b_1gpu.yaml --dry-run": "",
    "python benchmarks/rewards.py": "--num-workers 2 --out rewards.json",
    "megarl plot runs/NAME --out curves.png": "",
    "megarl plot runs/NAME-seed1 runs/NAME-seed2": "",
    "megarl train CONFIG name=first rollout.save=samples": SMALL,
    "megarl train CONFIG name=again rollout.replay=samples": SMALL,
    "megarl train CONFIG name=only rollout.save=more debug.generate_only=true": SMALL,
    "bash tests/run.sh --all": "tests/test_config_lora.py",
    "bash tests/run.sh tests/rewards -k length": "",
    "bash tests/lint.sh": "",
    ".venv/bin/ruff check --fix .": "",
    ".venv/bin/ruff format .": "",
}
# What needs a cluster, GPUs, ports or hours, or stands in another test already, by the test that does the same.
RUN_ELSEWHERE = {
    "tests/test_quickstart.py::test_mean_reward_and_held_out_accuracy_rise": [
        "megarl train CONFIG",
        "python benchmarks/quickstart.py",
    ],
    "tests/test_algorithms_learn.py::test_mean_reward_rises": ["python benchmarks/algorithms.py"],
    "tests/test_benchmarks.py::test_the_weight_sync_benchmark_runs_on_a_cpu": ["python benchmarks/weight_sync.py"],
    "tests/test_throughput.py::test_a_real_run_is_measured_and_profiled": [
        "python benchmarks/throughput.py qwen2.5-1.5b"
    ],
    "tests/engine/test_convert_ckpt.py::test_the_benchmark_of_conversions_runs": ["python benchmarks/convert.py"],
    "tests/test_slurm.py::test_a_job_of_two_nodes_goes_on_after_its_time_limit_and_trains_to_its_end": [
        "sbatch --nodes=4 --gpus-per-node=8 launch/slurm/train.sbatch CONFIG",
        "sbatch --nodes=4 --gpus-per-node=8 launch/slurm/train.sbatch CONFIG name=x",
    ],
    "tests/test_slurm.py::test_a_job_of_one_node_has_no_cluster_and_goes_on_after_its_time_limit_too": [
        "sbatch --gpus-per-node=8 launch/slurm/train_single_node.sbatch CONFIG name=x"
    ],
    "tests/test_ray_cluster.py::test_a_cluster_is_started_by_ssh_entered_with_its_token_and_ended": [
        'eval "$(launch/ray_cluster.sh start --nodes host1,host2)"',
        "launch/ray_cluster.sh stop",
    ],
    "tests/cluster/test_check.py::test_two_nodes_are_measured_and_the_one_with_another_version_is_named": [
        "megarl check CONFIG device=cuda --ray-address auto",
        "megarl check [CONFIG] [--ray-address HOST:PORT]",
    ],
    "tests/cluster/test_check.py::test_this_machine_is_fit_for_the_quickstart_and_nothing_is_left": [
        "megarl check configs/quickstart.yaml"
    ],
    "tests/test_ray_cluster.py::test_training_on_the_cluster_needs_its_address_alone": [
        "megarl train CONFIG device=cuda --ray-address auto",
        "megarl train CONFIG --ray-address auto",
    ],
    "tests/test_two_nodes.py::test_a_run_over_two_nodes_trains_syncs_and_leaves_nothing_in_the_cluster": [
        "megarl train CONFIG --ray-address HOST:PORT"
    ],
    "tests/test_ray_cluster.py::test_training_is_submitted_as_a_job_of_ray": [
        "launch/setup_env.sh jobs",
        'eval "$(launch/ray_cluster.sh start --nodes host1,host2 --dashboard-port 8265)"',
        "ray job submit --address http://127.0.0.1:8265 -- $PWD/.venv/bin/megarl train $PWD/CONFIG --ray-address auto",
    ],
    "tests/rollout/test_checksum.py::test_sglangs_own_checker_shows_an_expert_that_does_not_come_and_a_zeroed_row": [
        "megarl train CONFIG name=checksum trainer.steps=2 debug.sync_checksum=true"
    ],
    "tests/cluster/test_clean.py::test_clean_removes_what_dead_runs_left_and_nothing_else": [
        "megarl clean --ray-address HOST:PORT",
        "megarl clean [RUN_ID ...] [--ray-address ADDRESS] [--dry-run]",
    ],
    "tests/evaluation/test_run.py::test_two_models_are_compared_on_the_same_prompts": [
        "megarl eval --model sft=exported_sft --model rl=runs/longer --data test.jsonl --reward gsm8k",
        "megarl eval --model HF_OR_CKPT --data test.jsonl --reward math --samples-per-prompt 16 --temperature 1 --pass-at 1,4,16",
    ],
    "tests/test_serve_ab.py::test_two_real_servers_are_split_one_is_killed_and_all_end_together": [
        "launch/serve_ab.sh MODEL_A MODEL_B --weight-b 0.1 --port 30000 --log ab.jsonl"
    ],
    "tests/test_dockerfile.py::test_the_steps_that_can_run_here_do_and_the_others_are_those_that_are_known": [
        "docker build --build-arg USER_ID=$(id -u) --build-arg REVISION=$(git rev-parse HEAD) -t megarl .",
        "docker run --rm --gpus all --shm-size=8g --ulimit memlock=-1 --ulimit nofile=1048576 --stop-timeout 180 "
        '-v "$PWD:/workspace" -v megarl-cache:/home/megarl/.cache megarl megarl train CONFIG',
    ],
    "tests/test_dockerfile.py::test_the_packages_for_gpus_go_with_the_others_and_are_pinned": [
        "launch/setup_env.sh gpu"
    ],
    "tests/test_resume.py::test_a_run_that_was_killed_during_its_saves_ends_as_one_that_was_not": [
        "megarl train CONFIG name=x --resume auto"
    ],
    "tests/test_quickstart.py::test_training_again_on_its_samples_from_a_checkpoint_gives_the_rest_of_the_run_bit_for_bit": [
        "megarl train CONFIG name=y --resume runs/x/checkpoints/step_000100"
    ],
    "tests/gpu/test_checkpoint_gpu.py::test_training_goes_on_from_a_save_bit_for_bit": [
        "python benchmarks/checkpoint.py"
    ],
    "tests/engine/test_convert_ckpt.py::test_the_tool_converts_both_ways_and_says_what_it_wrote": [
        "tools/convert_ckpt.py --to-hf RUN_OR_CKPT OUT [--role critic] [--dtype bfloat16] [--max-shard-size 5GB] [--verify]",
        "tools/convert_ckpt.py --from-hf HF_FOLDER OUT",
    ],
    "tests/test_lora_run.py::test_adapters_are_trained_resumed_and_exported_merged_or_alone": [
        "tools/convert_ckpt.py --to-hf RUN_OR_CKPT OUT --lora peft"
    ],
    "tests/test_chain.py::test_reward_model_ppo_pairs_and_dpo_follow_one_another": [
        "megarl train configs/quickstart_ppo.yaml",
        "tools/make_preferences.py runs/quickstart_ppo runs/pairs.jsonl --margin 0.5",
        "tools/convert_ckpt.py --to-hf runs/quickstart_ppo runs/quickstart_ppo_hf",
        "megarl train configs/quickstart_dpo.yaml",
    ],
    "tests/gpu/test_train.py::test_the_quickstart_learns_on_gpus_and_trainer_and_server_agree": [
        "bash tests/gpu/run.sh"
    ],
    "tests/test_contributing.py::test_the_reward_scores_what_a_run_logged": [
        "megarl reward CONFIG --samples runs/NAME/samples.jsonl 'algorithm.reward={starts_with: {options: {text: \"The answer\"}}}'"
    ],
}
