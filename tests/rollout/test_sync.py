"""The order of a weight push, as seen by recording stand-ins; that weights arrive is shown by test_weights.py."""

from concurrent.futures import Future

import pytest

from megarl.config import SyncConfig
from megarl.errors import RunError
from megarl.rollout.sync import WeightSync
from megarl.rollout.weights_group import Bucket

BUCKETS = [[Bucket(["a"], ["float32"], [[1]]), Bucket(["b"], ["float32"], [[1]])], [Bucket(["c"], ["float32"], [[1]])]]


class Recorder:
    """The actor, the client and the canary: writes down what it is told."""

    backend = "gloo"
    urls = ["http://one", "http://two"]

    def __init__(self, fails_at=None, version="7"):
        self.events, self.fails_at, self.version = [], fails_at, version

    def __getattr__(self, name):
        return lambda *arguments, **named: self.events.append(name)

    def plan_buckets(self, bucket_bytes):
        return BUCKETS

    def sender_address(self, stage):
        return "127.0.0.1", 1000 + stage

    def init_weights_group(self, **named):
        self.events.append(("join", named["server_index"], named["group_name"], named["rank_offset"], named["world_size"]))
        return done()

    def start_join(self, *arguments):
        return {}

    def start_send(self, stage):
        self.events.append(("send", stage))
        return {}

    def receive_weights(self, buckets, group_name, weight_version, timeout_s):
        self.events.append(([bucket.names[0] for bucket in buckets], group_name, weight_version))
        broken = any(self.fails_at in bucket.names for bucket in buckets)
        return done(RunError("bucket 2 of 2: http://two: broken") if broken else None)

    def weight_versions(self, timeout_s):
        return ["7", self.version]

    def check(self, version, timeout_s):
        self.events.append(("canary", version))
        return 1e-6


def done(error=None):
    future = Future()
    future.set_exception(error) if error else future.set_result(None)
    return future


def test_servers_join_one_group_per_stage_behind_its_sender():
    recorder = Recorder()
    WeightSync(recorder, recorder, 2, SyncConfig(), recorder)
    assert [event for event in recorder.events if event[0] == "join"] == [
        ("join", index, f"megarl-weights-{stage}", 1 + 2 * index, 5) for stage in (0, 1) for index in (0, 1)
    ]


def test_a_push_pauses_sends_stage_by_stage_and_only_the_last_carries_the_version():
    recorder = Recorder()
    sync = WeightSync(recorder, recorder, 1, SyncConfig(), recorder)
    recorder.events.clear()
    metrics = sync.push(version=7)
    assert metrics.keys() == {"sync/gb_per_s", "sync/verify_s", "sync/canary_diff"} and metrics["sync/canary_diff"] == 1e-6
    assert recorder.events == [
        "close_gate",
        "pause",
        ("send", 0),
        (["a", "b"], "megarl-weights-0", None),
        ("send", 1),
        (["c"], "megarl-weights-1", "7"),
        "resume",
        ("canary", 7),
        "open_gate",
    ]


def test_a_failed_bucket_is_named_and_a_server_of_another_version_stops_the_run():
    recorder = Recorder(fails_at="b")
    sync = WeightSync(recorder, recorder, 1, SyncConfig(), recorder)
    with pytest.raises(RunError, match="sync to version 7, stage 0: bucket 2 of 2: http://two: broken"):
        sync.push(version=7)
    recorder = Recorder(version="6")
    sync = WeightSync(recorder, recorder, 1, SyncConfig(), recorder)
    with pytest.raises(RunError, match="http://two says it has weights of version 6 after the sync to version 7"):
        sync.push(version=7)
