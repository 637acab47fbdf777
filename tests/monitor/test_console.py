from megarl.monitor.console import Console


def test_a_loud_warning_is_shown_whole(capsys):
    words = [f"word{i}" for i in range(60)]
    with Console() as console:
        console.loud(" ".join(words))
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
