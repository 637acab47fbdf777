"""O22: what can never be placed is refused at once, with what is wanted and what each node has."""

import pytest
import ray

from megarl.cluster.placement import GroupRequest, plan_nodes, group_requests, place, remove
from megarl.config import Config
from megarl.errors import RunError

ACTOR_4, SERVER_4 = GroupRequest("actor", 4, 1, 1), GroupRequest("rollout server", 1, 1, 4)


def nodes(*totals):
    return {f"node-{i}": {"CPU": cpus, "GPU": gpus} for i, (cpus, gpus) in enumerate(totals)}


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
    for name, total in available.items():
        assert f"node {name} has {total['CPU']} CPU, {total['GPU']} GPU" in str(error.value)


def test_groups_that_fit_are_accepted():
    plan_nodes([ACTOR_4, SERVER_4], nodes((16, 8)))
    plan_nodes([ACTOR_4, ACTOR_4, SERVER_4], nodes((16, 4), (16, 4), (16, 4)))


def test_two_roles_that_span_nodes_get_nodes_of_their_own_in_order():
    actor, critic, server = GroupRequest("actor", 8, 1, 1), GroupRequest("critic", 4, 1, 1), GroupRequest("rollout server", 1, 1, 4)
    four = nodes((16, 8), (16, 8), (16, 8), (16, 8))
    planned = plan_nodes([actor, actor, critic, critic, server, server], four)
    assert planned[:2] == sorted(planned[:2]) and len(set(planned[:2])) == 2
    assert len(set(planned[2:4])) == 2 and not set(planned[:2]) & set(planned[2:])


def test_quickstart_fits_two_cores():
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "roles": {"actor": {"gpus_per_node": 2, "tensor_parallel": 2}},
        }
    )
    requests = group_requests(config, "cpu")
    assert [str(request) for request in requests] == [
        "actor: 1 CPU, 0 GPU on one node",
        "rollout server: 1 CPU, 0 GPU on one node",
    ]
    plan_nodes(requests, nodes((2, 0)))


@pytest.fixture
def ray_with_two_cpus(tmp_path):
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def test_held_resources_end_in_a_timeout_and_leave_no_group(ray_with_two_cpus):
    two = GroupRequest("actor", 2, 1, 0)
    held = place([two], timeout_s=30)
    with pytest.raises(RunError, match="(?s)1 s have passed without room for actor: 2 CPU.*node .* has 2 CPU"):
        place([two], timeout_s=1)
    remove(held)
    remove(place([two], timeout_s=30))  # nothing of the failed try holds a CPU
    with pytest.raises(RunError, match="the cluster is too small: no node for actor: 3 CPU"):
        place([GroupRequest("actor", 3, 1, 0)], timeout_s=600)
