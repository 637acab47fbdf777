import socket

from megarl.machine import interface_of, sees_gpu, why_port_unusable


def test_hidden_gpus_are_not_seen(monkeypatch):
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert sees_gpu() is False


def test_a_listening_port_is_in_use_until_it_is_closed():
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = server.getsockname()[1]
        assert why_port_unusable(port) == "is in use"
    assert why_port_unusable(port) is None


def test_ports_outside_the_range_are_refused():
    assert why_port_unusable(0) == why_port_unusable(65536) == "is outside 1..65535"


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("0.0.0.0") is None
