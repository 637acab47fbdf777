from megarl.logs import END_BYTES, log_end, log_excerpt


def test_the_log_excerpt_leads_with_the_last_error():
    noise = ["", "usage: sglang serve [-h]", "     [--tp-size TP_SIZE]"]
    log = "\n".join(["ValueError: early", "RuntimeError: no such kernel", *[f"line {i}" for i in range(20)], *noise])
    lines = log_excerpt(log, num_lines=3).splitlines()
    assert lines == ["  | RuntimeError: no such kernel", "  | line 17", "  | line 18", "  | line 19"]


def test_a_log_is_named_with_its_last_lines_or_with_the_node_that_has_it(tmp_path):
    log = tmp_path / "actor-1.log"
    assert log_end(log, "10.0.0.7") == f"log {log} on node 10.0.0.7"
    log.write_text("a line\n" * END_BYTES + "the last one\n")
    assert log_end(log, "10.0.0.7") == f"log {log}:\n" + "  | a line\n" * 11 + "  | the last one"
