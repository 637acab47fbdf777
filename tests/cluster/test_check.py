"""`megarl check` over two Ray nodes on this machine, one of which has another version of a package."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from config_folder import folder  # noqa: F401
from end_to_end import ROOT, Run, wait_until
from ray.cluster_utils import Cluster

from megarl import cli
from megarl.cluster import check_ranks
from megarl.cluster.check import compare_versions, look_at_nodes
from megarl.cluster.check_node import Gpu, NodeReport
from megarl.cluster.check_ranks import Findings, Rank, rounds, slow_pairs, tournament
from megarl.cluster.placement import Node

NODE_S = 60


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a cluster of two nodes; the second one believes that it has transformers 0.0.1."""
    packages = tmp_path_factory.mktemp("packages")
    about = packages / "transformers-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        small = {"num_gpus": 0, "object_store_memory": 2**27}
        cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False} | small)
        try:
            cluster.add_node(num_cpus=1, **small, env_vars={"PYTHONPATH": os.pathsep.join([str(packages), *paths])})
            yield cluster.address
        finally:
            cluster.shutdown()


def checked(capsys, *arguments: str) -> tuple[int, list[str]]:
    """Exit code, and what `megarl check` prints."""
    code = cli.main(["check", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


def test_two_nodes_are_measured_and_the_one_with_another_version_is_named(address, folder, capsys):
    before = sorted(folder.rglob("*"))
    code, lines = checked(capsys, "base.yaml", "--ray-address", address)
    problems = [line for line in lines if line.startswith("problem: ")]
    assert code == 1 and len(problems) == 1 and lines[-1] == "verdict: 1 problem", lines
    ours, other = problems[0].removeprefix("problem: transformers differs: ").split("; ")
    assert ours.startswith("5.") and ours.count(" on this process, ") == 1
    assert other.startswith("0.0.1 on ") and "," not in other
    assert lines[0] == "2 nodes, device cpu"
    assert any(line.startswith("network: every node reaches every other one; slowest ") for line in lines)
    assert f"run directory: {folder}/runs is shared and writable" in lines
    speeds = [line.split() for line in lines if "16 MiB" in line]
    assert [row[:2] for row in speeds] == [["all-reduce", "of"], ["broadcast", "of"], ["1", "pair"]]
    assert speeds[2][2:4] == ["between", "nodes,"] and all(float(row[-1]) > 0 for row in speeds)
    assert any(line.startswith(f"model: {folder}/model: 1 safetensors of 0.00 GB, digest ") for line in lines)
    assert sorted(folder.rglob("*")) == before  # the markers are gone


@pytest.mark.soak
def test_a_rank_that_never_comes_is_named_within_the_deadline_and_ends(address, folder, capsys, monkeypatch):
    stopped = []

    def stop_first(ranks: list[Rank], what: str, *arguments):
        if what.startswith("meeting"):
            stopped.append(ray.get(ranks[1].handle.__ray_call__.remote(lambda rank: os.getpid())))
            os.kill(stopped[0], signal.SIGSTOP)
        return together(ranks, what, *arguments)

    together = check_ranks.together
    monkeypatch.setattr(check_ranks, "together", stop_first)
    code, lines = checked(capsys, "base.yaml", "rollout.servers=9", "--ray-address", address, "--timeout", "3")
    late = [line for line in lines if line.startswith("problem: meeting at ")]
    assert code == 1 and len(late) == 1, lines
    assert "rank 1 on " in late[0] and "does not answer within 5 s; the others waited 3 s for it (--timeout)" in late[0]
    assert "rank 0" not in late[0]
    assert "problem: the cluster is too small: no node for rollout server: 1 CPU, 0 GPU on one node" in lines
    assert wait_until(lambda: not Path(f"/proc/{stopped[0]}").exists(), NODE_S)


@pytest.mark.soak
def test_this_machine_is_fit_for_the_quickstart_and_nothing_is_left(tmp_path):
    with Run(tmp_path, str(ROOT / "configs/quickstart.yaml"), command="check") as run:
        assert run.wait(120) == 0, run.output
    lines = run.output.splitlines()
    assert lines[-1] == "verdict: this node is fit for a run", run.output
    assert any(line.split()[:4] == ["1", "pair", "inside", "a"] for line in lines), run.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt"]


def test_what_is_no_cluster_and_what_is_no_address_are_refused(folder, capsys):
    assert cli.main(["check", "--ray-address", "127.0.0.1:1"]) == 1
    assert "cluster.ray_address: nothing answers at 127.0.0.1:1" in capsys.readouterr().err
    assert cli.main(["check", "--ray-address", "here", "--timeout", "5"]) == 2
    assert "cluster.ray_address=here: given 'here', valid: HOST:PORT" in capsys.readouterr().err
    assert cli.main(["check", "--timeout", "0"]) == 2


# What is made of the nodes' answers

GPU = Gpu(0, "H200", total_gb=150.0, free_gb=149.0, holders=[])
NODE = NodeReport("a", "10.0.0.1", {}, cpus=8, memory_gb=(60.0, 64.0), shared_memory_gb=(30.0, 32.0), gpus=[GPU])


def looked_at(report: NodeReport, gpus_in_ray: int = 1, device: str = "cuda") -> Findings:
    findings, resources = Findings(), {"GPU": float(gpus_in_ray)}
    look_at_nodes({"a": report}, [Node("a", "id", resources, resources)], device, findings)
    return findings


def test_a_gpu_that_somebody_holds_is_told_with_who_it_is():
    assert looked_at(NODE) == Findings()
    taken = replace(GPU, index=3, free_gb=100.0, holders=["python 4711, 48.0 GB", "python 4712"])
    findings = looked_at(replace(NODE, gpus=[taken]))
    text = "a GPU 3 (H200): 50.0 of 150.0 GB are taken by python 4711, 48.0 GB, python 4712"
    assert findings == Findings([], [text])
    assert looked_at(replace(NODE, gpus=[taken]), device="cpu") == Findings()


def test_gpus_that_ray_does_not_count_and_a_small_dev_shm_are_told():
    (warning,) = looked_at(NODE, gpus_in_ray=0).warnings
    assert warning.startswith("a: its driver has 1 GPUs, but Ray counts 0 there")
    (problem,) = looked_at(replace(NODE, shared_memory_gb=(0.06, 0.07))).problems
    assert problem.startswith("a: /dev/shm has 0.06 of 0.07 GB free, wanted 1 or more")


def test_versions_that_differ_or_are_missing_are_told_with_who_has_them():
    same = {"torch": "2.11.0", "ray": "2.60.0"}
    findings = Findings()
    compare_versions({"a": same | {"NVIDIA driver": "590.1"}, "b": same}, findings)  # b has no GPU
    assert findings == Findings()
    compare_versions({"a": same, "b": same | {"torch": "2.10.0"}, "c": same, "d": {"torch": "2.11.0"}}, findings)
    expected = ["torch differs: 2.11.0 on a, c, d; 2.10.0 on b", "ray differs: 2.60.0 on a, b, c; none on d"]
    assert findings.problems == expected


@pytest.mark.parametrize("size", range(7))
def test_each_pair_meets_once_and_nobody_meets_two_at_a_time(size):
    played = list(tournament(list(range(size))))
    for pairs in played:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    met = sorted(tuple(sorted(pair)) for pairs in played for pair in pairs)
    assert met == [(a, b) for a in range(size) for b in range(a + 1, size)]


def test_pairs_inside_nodes_and_pairs_of_nodes_are_measured():
    ranks = [Rank(name, name[0], None) for name in ("a0", "a1", "a2", "b0", "b1", "c0")]
    found = {tuple(sorted((a.name, b.name))) for pairs in rounds(ranks) for a, b in pairs}
    assert found == {("a0", "a1"), ("a0", "a2"), ("a1", "a2"), ("b0", "b1"), ("a0", "b0"), ("a0", "c0"), ("b0", "c0")}


def test_a_pair_far_below_the_median_of_its_kind_is_slow():
    speeds = {
        "between nodes": {"a and b": 20.0, "a and c": 21.0, "b and c": 4.0},
        "inside a node": {"a": 9.0, "b": 1.0},
    }
    assert slow_pairs(speeds) == ["slow: b and c, 4.00 GB/s where the median between nodes is 20.00"]
