"""O22: what can never be placed is refused at once, with what is wanted and what each node has."""

import re

import pytest
import ray

from megarl.cluster import placement
from megarl.cluster.placement import GroupRequest, Node, group_requests, place, plan_nodes, remove
from megarl.config import Config
from megarl.errors import RunError

ACTOR_4, SERVER_4 = GroupRequest("actor", 4, 1, 1), GroupRequest("rollout server", 1, 1, 4)


def nodes(*totals: tuple[float, float]) -> list[Node]:
    """Nodes of so many CPUs and GPUs, of which one CPU each is held."""
    each = [({"CPU": cpus, "GPU": gpus}, {"CPU": cpus - 1, "GPU": gpus}) for cpus, gpus in totals]
    return [Node(f"node-{i}", f"id-{i}", *amounts) for i, amounts in enumerate(each)]


@pytest.mark.parametrize(
    "requests, available, unplaced",
    [
        ([ACTOR_4, SERVER_4], nodes((2, 0)), "actor: 4 CPU, 4 GPU"),
        ([GroupRequest("actor", 8, 1, 1)], nodes((16, 4), (16, 4)), "actor: 8 CPU, 8 GPU"),
        ([GroupRequest("actor", 4, 8, 1)], nodes((16, 8)), "actor: 32 CPU, 4 GPU"),
        ([ACTOR_4, ACTOR_4], nodes((16, 8)), "actor: 4 CPU, 4 GPU"),  # two groups of one role need two nodes
        ([ACTOR_4, SERVER_4], nodes((16, 4)), "rollout server: 1 CPU, 4 GPU"),
    ],
)
def test_infeasible_groups_are_refused_with_the_numbers(requests, available, unplaced):
    with pytest.raises(RunError, match=f"no node for {unplaced} on one node") as error:
        plan_nodes(requests, available)
    lines = [line.split() for line in str(error.value).splitlines()]
    for node in available:
        cpus, gpus = node.total["CPU"], node.total["GPU"]
        assert [node.name, f"{cpus}", f"{gpus}", f"{cpus - 1}", f"{gpus}"] in lines


def test_the_table_counts_groups_and_lines_up():
    with pytest.raises(RunError) as error:
        plan_nodes([ACTOR_4, ACTOR_4, SERVER_4], nodes((128, 8)))
    assert str(error.value).splitlines()[1:] == [
        "  wanted, each on one node     groups        CPU        GPU",
        "  actor                             2          4          4",
        "  rollout server                    1          1          4",
        "  node                      total CPU  total GPU   free CPU   free GPU",
        "  node-0                          128          8        127          8",
    ]


def test_groups_that_fit_are_accepted():
    plan_nodes([ACTOR_4, SERVER_4], nodes((16, 8)))
    plan_nodes([ACTOR_4, ACTOR_4, SERVER_4], nodes((16, 4), (16, 4), (16, 4)))


def test_servers_are_spread_where_packing_them_would_leave_one_out():
    actor, server = GroupRequest("actor", 1, 3, 0), GroupRequest("rollout server", 1, 2.5, 0)
    planned = plan_nodes([actor, server, server, server], nodes((5, 0), (6, 0)))
    assert [node.name for node in planned] == ["node-1", "node-0", "node-1", "node-0"]


def test_a_role_of_two_nodes_gets_both_before_a_server_takes_the_small_one():
    ranks, server = GroupRequest("actor", 1, 0.5, 0), GroupRequest("rollout server", 1, 1, 0)
    planned = plan_nodes([ranks, ranks, server], nodes((3, 0), (1, 0)))
    assert [node.name for node in planned] == ["node-0", "node-1", "node-0"]


def test_two_roles_that_span_nodes_get_nodes_of_their_own_in_order():
    actor, critic, server = (
        GroupRequest("actor", 8, 1, 1),
        GroupRequest("critic", 4, 1, 1),
        GroupRequest("rollout server", 1, 1, 4),
    )
    four = nodes((16, 8), (16, 8), (16, 8), (16, 8))
    planned = plan_nodes([actor, actor, critic, critic, server, server], four)
    names = [node.name for node in planned]
    assert names[:2] == sorted(names[:2]) and len(set(names[:2])) == 2
    assert len(set(names[2:4])) == 2 and not set(names[:2]) & set(names[2:])


def test_teacher_servers_may_share_a_node_with_each_other_and_with_the_actor():
    actor, teacher = GroupRequest("actor", 2, 1, 1), GroupRequest("teacher server", 1, 1, 1)
    planned = plan_nodes([actor, teacher, teacher], nodes((16, 4)))
    assert [node.name for node in planned] == ["node-0"] * 3


def requests_of(device: str, **settings) -> list[GroupRequest]:
    base = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}}
    return group_requests(Config.model_validate(base | settings), device)


ROLES = {
    "actor": {"gpus_per_node": 2, "tensor_parallel": 2},
    "teacher": {"path": "big", "servers": 2, "tensor_parallel": 4, "cpus_per_server": 3.0},
}


def test_a_teachers_servers_have_groups_of_their_own():
    rollout = {"servers": 2, "cpus_per_server": 0.5}
    requests = requests_of("cuda", roles=ROLES, rollout=rollout, algorithm={"name": "distillation"})
    rollout_server, teacher_server = GroupRequest("rollout server", 1, 0.5, 1), GroupRequest("teacher server", 1, 3, 4)
    assert requests == [GroupRequest("actor", 2, 1, 1), *[rollout_server] * 2, *[teacher_server] * 2]


def test_colocated_rollout_servers_share_the_actors_bundles_and_the_teachers_do_not():
    distillation = {"roles": ROLES, "algorithm": {"name": "distillation"}, "placement": "colocated"}
    teacher_server = GroupRequest("teacher server", 1, 3, 4)
    assert requests_of("cuda", **distillation) == [GroupRequest("actor", 2, 1.5, 1), *[teacher_server] * 2]


def test_a_colocated_critic_shares_the_actors_bundles():
    ppo = {"algorithm": {"name": "ppo"}, "placement": "colocated"}
    roles = {"actor": ROLES["actor"], "critic": {"cpus_per_rank": 2.0}}
    assert requests_of("cuda", **ppo, roles=roles) == [GroupRequest("actor", 2, 3.5, 1)]
    assert requests_of("cuda", algorithm=ppo["algorithm"], roles=roles)[1] == GroupRequest("critic", 1, 2, 1)


@pytest.mark.parametrize("placed", ["disaggregated", "colocated"])
def test_a_reward_model_has_gpus_of_its_own(placed):
    roles = {"actor": ROLES["actor"], "reward_model": {"path": "reward", "gpus_per_node": 2, "nodes": 2}}
    group = GroupRequest("reward_model", 2, 1, 1)
    assert requests_of("cuda", placement=placed, roles=roles)[1:3] == [group, group]
    roles = {"actor": ROLES["actor"], "reward_server": {"path": "reward", "servers": 2, "tensor_parallel": 4}}
    server = GroupRequest("reward server", 1, 1, 4)
    assert requests_of("cuda", placement=placed, roles=roles)[-2:] == [server, server]


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_supervised_runs_have_no_servers(name):
    requests = requests_of("cpu", roles={"actor": ROLES["actor"]}, algorithm={"name": name})
    assert requests == [GroupRequest("actor", 2, 0.5, 0)]


def test_quickstart_fits_two_cores():
    requests = requests_of("cpu", roles={"actor": ROLES["actor"]})
    assert [str(request) for request in requests] == [
        "actor: 1 CPU, 0 GPU on one node",
        "rollout server: 1 CPU, 0 GPU on one node",
    ]
    plan_nodes(requests, nodes((2, 0)))


@pytest.fixture
def ray_with_two_cpus(tmp_path):
    ray.init(
        address="local", num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    yield
    ray.shutdown()


def test_held_resources_end_in_a_timeout_that_names_the_holder_and_leave_no_group(ray_with_two_cpus, monkeypatch):
    monkeypatch.setattr(placement, "PROGRESS_S", 0.4)
    one, two, lines = GroupRequest("rollout server", 1, 1, 0), GroupRequest("actor", 2, 1, 0), []
    held = place([one, one], "megarl-first-0123abcd", 30, lines.append)
    assert lines == []
    with pytest.raises(RunError, match="3 s have passed without room for actor: 2 CPU, 0 GPU on one node") as error:
        place([two], "megarl-second-0123abcd", 3, lines.append)
    table = [line.split() for line in str(error.value).splitlines()]
    assert ["actor", "1", "2", "0"] in table and any(row[-4:] == ["2", "0", "0", "0"] for row in table)
    holders = {f"megarl-first-0123abcd/rollout server/{i} 1 CPU, 0 GPU" for i in range(2)}
    assert {line.removeprefix("  held by ") for line in str(error.value).splitlines()[-2:]} == holders
    assert re.match(r"waiting for room, \d of 3 s: actor: 2 CPU, 0 GPU on one node; free: ", lines[0])
    assert " 0 CPU, 0 GPU; held by others: " in lines[0] and all(holder in lines[0] for holder in holders)
    remove(held)
    remove(place([two], "megarl-fourth-0123abcd", 30, lines.append))  # nothing of the failed try holds a CPU
    with pytest.raises(RunError, match="the cluster is too small: no node for actor: 3 CPU"):
        place([GroupRequest("actor", 3, 1, 0)], "megarl-fifth-0123abcd", 600, lines.append)
