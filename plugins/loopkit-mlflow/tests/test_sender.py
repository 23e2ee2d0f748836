"""From a spool to a real server, over a network that fails."""

import pytest
from support import answering

from loopkit_mlflow.client import Client, Denied, Unavailable
from loopkit_mlflow.sender import SENT_TAG, Sender, SenderThread
from loopkit_mlflow.spool import Header, Spool


def metric(step, key="loss", value=None):
    return {"key": key, "value": step / 8 if value is None else value, "timestamp": 1000 + step, "step": step}


@pytest.fixture
def make_spool(spools, experiment):
    made = []

    def make(uri, **options):
        header = Header(uri, experiment, "a run", {"color": "red"}, 1_700_000_000_000, **options)
        spool = Spool.create(spools, header)
        spool.open_for_writing()
        made.append(spool)
        return spool

    yield make
    for spool in made:
        spool.close()


@pytest.fixture
def make_sender():
    made = []

    def make(spool, timeout=60.0):
        made.append(Sender(spool, Client(spool.header.uri, timeout)))
        return made[-1]

    yield make
    for sender in made:
        sender.client.close()


def drain(sender):
    while sender.send():
        pass


def test_batches_arrive(make_spool, make_sender, server, mlflow_server, experiment):
    spool = make_spool(server)
    spool.append(params=[{"key": "lr", "value": "0.1"}], tags=[{"key": "note", "value": "hello"}])
    for step in range(3):
        spool.append(metrics=[metric(step), metric(step, "a/b")])
    spool.append(status={"status": "FINISHED", "end_time": 1_700_000_001_000})
    assert spool.left == 5
    drain(make_sender(spool))
    assert spool.left == 0
    run = mlflow_server.run(experiment)["info"]
    assert (run["run_name"], run["status"], run["start_time"]) == ("a run", "FINISHED", 1_700_000_000_000)
    assert mlflow_server.params(experiment) == {"lr": "0.1"}
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0), (1, 0.125), (2, 0.25)]
    assert mlflow_server.history(experiment, "a/b") == [(0, 0.0), (1, 0.125), (2, 0.25)]
    tags = mlflow_server.tags(experiment)
    assert (tags["note"], tags["color"], tags["loopkit.source"]) == ("hello", "red", spool.header.source)
    assert tags[SENT_TAG] == f"{spool.header.log}:5"


def test_metrics_go_together_in_few_requests(make_spool, make_sender, network, mlflow_server, experiment):
    spool = make_spool(network.uri)
    for step in range(1000):
        spool.append(metrics=[metric(step), metric(step, "acc")])
    drain(make_sender(spool))
    assert sum("log-batch" in each for each in network.requests) == 3
    assert len(mlflow_server.history(experiment, "acc")) == 1000


def test_batches_that_go_together_are_few_enough_for_mlflow(
    make_spool, make_sender, network, mlflow_server, experiment
):
    spool = make_spool(network.uri)
    for step in range(250):
        tags = [{"key": f"tag {step}", "value": "x" * 5000}]
        spool.append(metrics=[metric(step)], params=[{"key": f"p{step}", "value": "1"}], tags=tags)
    drain(make_sender(spool))
    assert sum("log-batch" in each for each in network.requests) == 3  # 90 parameters each
    assert spool.refused == []
    assert len(mlflow_server.params(experiment)) == len(mlflow_server.history(experiment, "loss")) == 250


def test_another_sender_goes_on(make_spool, make_sender, server, mlflow_server, experiment):
    spool = make_spool(server)
    spool.append(metrics=[metric(0)])
    drain(make_sender(spool))
    spool.append(metrics=[metric(1)])
    drain(make_sender(spool))
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0), (1, 0.125)]


def test_a_lost_note_of_what_was_sent_is_found_on_the_server(make_spool, make_sender, network):
    spool = make_spool(network.uri)
    for step in range(3):
        spool.append(metrics=[metric(step)])
    drain(make_sender(spool))
    (spool.directory / "sent.json").unlink()
    network.requests.clear()
    assert spool.left == 3
    drain(make_sender(spool))
    assert spool.left == 0
    assert not any("log-batch" in each or "create" in each for each in network.requests)


def test_a_note_that_cannot_be_written_sends_nothing_twice(make_spool, make_sender, network, mlflow_server, experiment):
    spool = make_spool(network.uri)
    spool.append(metrics=[metric(0)])
    sender = make_sender(spool)
    drain(sender)
    spool.append(metrics=[metric(1)])
    draft = spool.directory / "sent.json.new"
    draft.mkdir()  # as a full disk would
    for _ in range(2):
        with pytest.raises(OSError, match=r"sent\.json\.new"):
            sender.send()
    draft.rmdir()
    drain(sender)
    assert spool.left == 0
    assert sum("log-batch" in each for each in network.requests) == 2
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0), (1, 0.125)]


def test_an_answer_of_another_server_stops_the_sender(make_spool, make_sender, wait_until):
    with answering(b'{"experiment": {}}') as uri:
        spool = make_spool(uri)
        spool.append(metrics=[metric(0)])
        with pytest.raises(Denied, match=r"without 'lifecycle_stage', with \{\}: it is no MLflow server"):
            make_sender(spool).send()
        thread = SenderThread(make_sender(spool))
        thread.start()
        wait_until(lambda: "it is no MLflow server" in thread.problem)
        thread.finish(0)
        thread.join(60)
    assert spool.left == 1


def test_the_run_is_found_again_if_the_answer_that_made_it_was_lost(
    make_spool, make_sender, network, mlflow_server, experiment
):
    spool = make_spool(network.uri)
    spool.append(metrics=[metric(0)])
    sender = make_sender(spool)
    network.mode, network.matching = "lost", b"runs/create"
    with pytest.raises(Unavailable, match="runs/create failed"):
        sender.send()
    network.mode = "good"
    drain(sender)
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0)]  # and there is one run


def test_a_batch_whose_answer_was_lost_arrives_once(make_spool, make_sender, network, mlflow_server, experiment):
    spool = make_spool(network.uri)
    spool.append(metrics=[metric(0), metric(1)])
    sender = make_sender(spool)
    network.mode, network.matching = "lost", b"log-batch"
    with pytest.raises(Unavailable, match="log-batch failed"):
        sender.send()
    network.mode = "good"
    network.requests.clear()
    drain(sender)
    assert not any("log-batch" in each for each in network.requests)  # the server said that it has it
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0), (1, 0.125)]


def test_a_batch_that_is_sent_twice_is_there_once(make_spool, make_sender, server, mlflow_server, experiment):
    """What is left where a slow server gets a batch again before it has written the first one."""
    spool = make_spool(server)
    batch = [metric(0), metric(1, value="NaN"), metric(2, value="Infinity")]
    spool.append(metrics=batch)
    spool.append(metrics=batch)
    drain(make_sender(spool))
    history = mlflow_server.history(experiment, "loss")
    assert history == [(0, 0.0), (1, "NaN"), (2, 1.7976931348623157e308)]  # so MLflow keeps an infinite number


@pytest.mark.parametrize("mode", ["away", "broken"])
def test_nothing_is_lost_while_the_server_is_away(make_spool, make_sender, network, mlflow_server, experiment, mode):
    spool = make_spool(network.uri)
    spool.append(metrics=[metric(0)])
    sender = make_sender(spool)
    drain(sender)
    network.mode = mode
    for step in range(1, 4):
        spool.append(metrics=[metric(step)])
        with pytest.raises(Unavailable):
            sender.send()
    network.mode = "good"
    drain(sender)
    assert mlflow_server.history(experiment, "loss") == [(step, step / 8) for step in range(4)]


def test_a_server_that_does_not_answer_is_waited_for_so_long(make_spool, make_sender, network):
    spool = make_spool(network.uri)
    spool.append(metrics=[metric(0)])
    network.mode, network.delay = "slow", 1.0
    with pytest.raises(Unavailable, match=r"no answer to GET .*get-by-name within 0\.2 s"):
        make_sender(spool, timeout=0.2).send()


def test_what_is_refused_is_set_aside_and_the_rest_arrives(make_spool, make_sender, server, mlflow_server, experiment):
    spool = make_spool(server)
    bad = metric(5, "re@call")
    spool.append(metrics=[*(metric(step) for step in range(10)), bad, *(metric(step) for step in range(10, 20))])
    spool.append(metrics=[metric(20)])
    sender = make_sender(spool)
    drain(sender)
    assert [step for step, _ in mlflow_server.history(experiment, "loss")] == list(range(21))
    (refused,) = spool.refused
    assert (refused["kind"], refused["item"]) == ("metrics", bad)
    assert "Names may only contain" in refused["why"]
    assert sender.refusal == refused["why"]
    assert sender.send_refused() == (1, 1)
    assert spool.refused == [refused]


def test_a_parameter_that_has_changed_becomes_a_tag(make_spool, make_sender, server, mlflow_server, experiment):
    spool = make_spool(server)
    spool.append(params=[{"key": "lr", "value": "0.1"}, {"key": "epochs", "value": "3"}])
    spool.append(params=[{"key": "lr", "value": "0.1"}, {"key": "epochs", "value": "5"}])
    drain(make_sender(spool))
    assert mlflow_server.params(experiment) == {"lr": "0.1", "epochs": "3"}
    assert mlflow_server.tags(experiment)["loopkit.param.epochs"] == "5"


def test_a_run_that_was_deleted_stops_the_sender_and_restored_it_goes_on(
    make_spool, make_sender, server, mlflow_server, experiment
):
    spool = make_spool(server)
    spool.append(metrics=[metric(0)])
    sender = make_sender(spool)
    drain(sender)
    mlflow_server.ask("runs/delete", {"run_id": sender.run_id})
    spool.append(metrics=[metric(1)])
    for _ in range(2):
        with pytest.raises(Denied, match=f"run {sender.run_id} on .* was deleted: restore it"):
            sender.send()
    assert spool.refused == []
    mlflow_server.ask("runs/restore", {"run_id": sender.run_id})
    drain(sender)
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0), (1, 0.125)]


def test_an_experiment_that_was_deleted_is_said(make_spool, make_sender, server, mlflow_server, experiment):
    made = mlflow_server.ask("experiments/create", {"name": experiment})["experiment_id"]
    mlflow_server.ask("experiments/delete", {"experiment_id": made})
    spool = make_spool(server)
    with pytest.raises(Denied, match="was deleted: restore it, or choose another name"):
        make_sender(spool).send()


def test_a_file_that_the_server_does_not_take_holds_nothing_up(
    make_spool, make_sender, network, mlflow_server, experiment
):
    spool = make_spool(network.uri)
    file = spool.place_for("a.txt")
    file.write_text("hello")
    spool.append(artifacts=[{"file": str(file.relative_to(spool.directory)), "path": "text/a.txt"}])
    spool.append(metrics=[metric(0)])
    sender = make_sender(spool)
    network.mode, network.matching = "broken", b"PUT"
    for _ in range(2):
        with pytest.raises(Unavailable, match="500"):
            sender.send()
    drain(sender)
    assert mlflow_server.history(experiment, "loss") == [(0, 0.0)]
    assert file.exists()
    network.mode = "good"
    assert sender.send_refused() == (1, 0)
    assert mlflow_server.artifact(experiment, "text/a.txt") == b"hello"
    assert not file.exists()


def test_an_empty_file_arrives(make_spool, make_sender, server, mlflow_server, experiment):
    spool = make_spool(server)
    file = spool.place_for("a.txt")
    file.touch()
    spool.append(artifacts=[{"file": str(file.relative_to(spool.directory)), "path": "a.txt"}])
    drain(make_sender(spool))
    assert mlflow_server.artifact(experiment, "a.txt") == b""
    assert not file.exists()


def test_a_file_that_is_gone_is_noted(make_spool, make_sender, server, experiment):
    spool = make_spool(server)
    spool.append(artifacts=[{"file": "files/000001/0/gone.txt", "path": "gone.txt"}])
    drain(make_sender(spool))
    assert "No such file" in spool.refused[0]["why"]


def test_the_thread_sends_what_comes_and_ends(make_spool, make_sender, server, mlflow_server, experiment, wait_until):
    spool = make_spool(server)
    thread = SenderThread(make_sender(spool))
    thread.start()
    for step in range(5):
        spool.append(metrics=[metric(step)])
        thread.wake()
        wait_until(lambda: spool.left == 0)
    thread.finish(60)
    assert not thread.is_alive()
    assert thread.problem == ""
    assert not (spool.directory / ".lock").exists()


def test_the_thread_goes_on_when_the_server_is_back(make_spool, make_sender, network, wait_until):
    spool = make_spool(network.uri)
    network.mode = "away"
    thread = SenderThread(make_sender(spool))
    thread.start()
    spool.append(metrics=[metric(0)])
    thread.wake()
    wait_until(lambda: "get-by-name failed" in thread.problem)
    network.mode = "good"
    wait_until(lambda: spool.left == 0 and not thread.problem)
    thread.finish(60)
    assert not thread.is_alive()


def test_the_end_waits_no_longer_than_it_may(make_spool, make_sender, network, wait_until):
    spool = make_spool(network.uri)
    network.mode = "away"
    thread = SenderThread(make_sender(spool))
    thread.start()
    spool.append(metrics=[metric(0)])
    thread.finish(0.2)
    thread.join(60)
    assert not thread.is_alive()
    assert spool.left == 1


def test_two_do_not_send_one_spool(make_spool, make_sender, server, wait_until):
    spool = make_spool(server)
    first, second = SenderThread(make_sender(spool)), SenderThread(make_sender(spool))
    first.start()
    wait_until(lambda: (spool.directory / ".lock").exists())
    second.start()
    wait_until(lambda: "is locked by this process" in second.problem)
    second.finish(0)
    first.finish(60)
    second.join(60)
    assert not first.is_alive()
    assert not second.is_alive()
