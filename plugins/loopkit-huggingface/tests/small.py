"""Small models with random weights, and batches for them."""

import copy
from functools import partial

import torch
from loopkit_testing import Problem
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from loopkit import Learner
from loopkit_huggingface import PredictionPhase, TrainingPhase, ValidationPhase

VOCABULARY, LENGTH = 40, 12
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def gpt2(dropout=0.1, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **tokens, loss_type="ForCausalLM", **options))


def bert_sizes():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {**sizes, "intermediate_size": 32, "max_position_embeddings": 32}


def bert(labels=3):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**bert_sizes(), num_labels=labels))


def texts(batches=4, samples=3, seed=0, masked=True):
    """Batches of token ids; the labels of a prefix of each sample, of another length in each, are masked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
        prefix = torch.randint(1, LENGTH - 2, (samples, 1), generator=generator)
        labels = ids.masked_fill(torch.arange(LENGTH) < prefix, -100) if masked else ids.clone()
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def classes(batches=4, samples=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3})
    return made


def joined(batches):
    """One batch that holds all of these."""
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def phases():
    return [TrainingPhase(), ValidationPhase(), PredictionPhase()]


def learner(model, *plugins, optimizer=sgd, standard=False, **options):
    return Learner(model, None, optimizer, plugins=plugins, standard=standard, **{"phases": phases(), **options})


def weights(model):
    return copy.deepcopy(model.state_dict())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def problem():
    return Problem(gpt2(), None, sgd, texts(), texts(2, seed=1))
