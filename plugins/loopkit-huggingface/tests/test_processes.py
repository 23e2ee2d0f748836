"""Two processes: gradients by tokens, and sharded weights that are saved whole."""

import pytest
import torch
from datasets import Dataset
from loopkit_sharded import FSDP
from small import gpt2, learner, same, sgd, texts, weights
from transformers import GPT2LMHeadModel

import loopkit
from loopkit.plugins import DDP, Metrics
from loopkit_huggingface import DatasetLoader, Perplexity, SavePretrained

pytestmark = pytest.mark.two_processes


def samples():
    return Dataset.from_list([{k: v[i].tolist() for k, v in batch.items()} for batch in texts() for i in range(3)])


def train(kind, folder, batch_size):
    torch.set_num_threads(1)
    sync = DDP(weighted=True) if kind == "ddp" else FSDP()
    save = SavePretrained(folder, None, monitor="val/perplexity")
    used = learner(gpt2(dropout=0.0), sync, save, Metrics(Perplexity()), optimizer=sgd)
    used.fit(DatasetLoader(samples(), batch_size), DatasetLoader(samples(), batch_size), epochs=1)
    return used.metrics, {name: value.clone() for name, value in used.state_dict()["models"]["model"].items()}


def trained(kind, folder):
    first, second = loopkit.launch(train, kind, str(folder), 2, processes=2)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    for label in ("best", "last"):
        found = weights(GPT2LMHeadModel.from_pretrained(folder / label))
        assert same({name: found[name] for name in first[1]}, first[1])
    return first


def test_two_processes_train_by_tokens_as_one_with_their_batches_together(tmp_path):
    metrics, found = trained("ddp", tmp_path)
    alone = learner(gpt2(dropout=0.0), Metrics(Perplexity()))
    alone.fit(DatasetLoader(samples(), 4), DatasetLoader(samples(), 4), epochs=1)
    expected = weights(alone.model)
    # three updates of 0.1 times float32 gradients of the order of 1, summed in another order
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=2e-6) for name in found)
    assert metrics["val/perplexity"] == pytest.approx(alone.metrics["val/perplexity"], rel=1e-6)


def test_sharded_weights_are_saved_whole(tmp_path):
    metrics, _ = trained("fsdp", tmp_path)
    assert metrics["val/perplexity"] < metrics["train/perplexity"]
