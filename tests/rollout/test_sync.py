"""The order of a push, as seen by recording stand-ins; that weights arrive is shown by test_weights.py and test_layouts.py."""

from concurrent.futures import Future

import pytest

from megarl.config import SyncConfig
from megarl.errors import RunError
from megarl.rollout.sync import BroadcastSync, ColocatedSync, SyncFailed
from megarl.rollout.weights_group import Bucket

BUCKETS = [[Bucket(["a"], ["float32"], [[1]]), Bucket(["b"], ["float32"], [[1]])], [Bucket(["c"], ["float32"], [[1]])]]


class Recorder:
    """The actor, the client and the canary: writes down what it is told."""

    backend = "gloo"

    def __init__(self, fails=None, version="7"):
        self.events, self.fails, self.version = [], fails, version
        self.urls = ["http://one", "http://two"]

    def __getattr__(self, name):
        return lambda *arguments, **named: self.events.append(name)

    def plan_buckets(self, bucket_bytes):
        return BUCKETS

    def sender_address(self, stage):
        return "127.0.0.1", 1000 + stage

    def join_weights_group(self, **named):
        self.events.append(("join", named["server_index"], named["rank_offset"], named["world_size"]))
        return done()

    def start_join(self, *arguments):
        return {}

    def start_send(self, stage, timeout_s):
        self.events.append(("send", stage))
        return {}

    def start_share(self, stage, servers, version, timeout_s):
        self.events.append(("share", stage, servers, version))
        return {}

    def place(self, phase):
        self.events.append(("place", phase))

    def used_bytes(self):
        return 3 * 10**9

    def resume_memory(self, tag, timeout_s):
        self.events.append(("resume", tag))

    def receive_weights(self, buckets, group_name, weight_version, timeout_s):
        self.events.append(([bucket.names[0] for bucket in buckets], weight_version))
        return done(RunError("http://two: broken") if self.fails == "receive" else None)

    def weight_versions(self, timeout_s):
        return ["7", self.version]

    def ask_trainer(self, version):
        self.events.append("ask_trainer")
        return lambda: ["the trainer's"]

    def ask_servers(self, version, timeout_s):
        self.events.append(("canary", version))
        return {}

    def compare(self, version, expected, answers):
        assert (expected, answers) == (["the trainer's"], {})
        return 1e-6


def done(error=None):
    future = Future()
    future.set_exception(error) if error else future.set_result(None)
    return future


def joins(recorder):
    return [event for event in recorder.events if event[0] == "join"]


def test_servers_join_one_group_per_stage_behind_its_sender_once():
    recorder = Recorder()
    sync = BroadcastSync(recorder, recorder, 2, SyncConfig(), recorder)
    sync.push(version=7)
    assert joins(recorder) == [("join", index, 1 + 2 * index, 5) for _ in BUCKETS for index in (0, 1)]
    sync.push(version=7)
    assert len(joins(recorder)) == 4


def test_a_push_pauses_sends_stage_by_stage_and_only_the_last_carries_the_version():
    recorder = Recorder()
    sync = BroadcastSync(recorder, recorder, 1, SyncConfig(), recorder)
    sync.push(version=7)
    recorder.events.clear()
    metrics = sync.push(version=7)
    assert (
        metrics.keys() == {"sync/gb_per_s", "sync/verify_s", "sync/canary_diff"} and metrics["sync/canary_diff"] == 1e-6
    )
    assert recorder.events == [
        "close_gate",
        "pause",
        ("place", "score"),
        ("send", 0),
        (["a", "b"], None),
        ("send", 1),
        (["c"], "7"),
        "ask_trainer",
        "resume",
        ("canary", 7),
        "open_gate",
    ]


def test_the_groups_are_made_anew_after_a_failure_and_where_the_servers_are_others():
    recorder = Recorder(fails="receive")
    sync = BroadcastSync(recorder, recorder, 1, SyncConfig(), recorder)
    with pytest.raises(SyncFailed, match="sync to version 7, stage 0: http://two: broken"):
        sync.push(version=7)
    assert "open_gate" not in recorder.events
    recorder.fails = None
    sync.push(version=7)
    assert len(joins(recorder)) == 8
    sync.forget_servers()  # one was started again, at its old address
    sync.push(version=7)
    assert len(joins(recorder)) == 12
    recorder.urls = ["http://one", "http://three"]
    sync.push(version=7)
    assert len(joins(recorder)) == 16


def test_a_server_of_another_version_fails_the_push():
    recorder = Recorder(version="6")
    sync = BroadcastSync(recorder, recorder, 1, SyncConfig(), recorder)
    with pytest.raises(SyncFailed, match="sync to version 7, http://two says that it has weights of version 6"):
        sync.push(version=7)
    assert "open_gate" not in recorder.events


def test_in_turns_the_cache_comes_back_only_after_the_actors_weights_have_left():
    recorder = Recorder()
    sync = ColocatedSync(recorder, recorder, 2, SyncConfig(), recorder)
    sync.push(version=7)
    recorder.events.clear()
    sync.make_room()
    sync.make_room()
    assert recorder.events == ["leave_gpus"]
    recorder.events.clear()
    assert sync.push(version=7)["memory/sync_gpu_gb"] == 3
    servers = {"http://one": 2, "http://two": 2}
    assert recorder.events == [
        "close_gate",
        "pause",
        ("place", "score"),
        ("resume", "weights"),
        ("share", 0, servers, None),
        ("share", 1, servers, "7"),
        "ask_trainer",
        ("place", "generate"),
        ("resume", "kv_cache"),
        "resume",
        ("canary", 7),
        "open_gate",
    ]
