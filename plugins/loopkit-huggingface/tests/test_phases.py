"""Training with the loss of the model: against loops by hand, masked labels, and what is refused."""

import math

import pytest
import torch
from small import VOCABULARY, bert, bert_sizes, classes, gpt2, joined, learner, same, sgd, texts, weights
from torch import nn
from transformers import BatchEncoding, BertConfig, BertForMaskedLM, BertModel, T5Config, T5ForConditionalGeneration

from loopkit import Learner, hookimpl
from loopkit.errors import LossError, PhaseError, PhaseInputError
from loopkit.metrics import Accuracy
from loopkit.plugins import Compile, Metrics, MixedPrecision, ToDevice
from loopkit_huggingface import Perplexity, PredictionPhase, TrainingPhase, ValidationPhase


def by_hand(model, batches, epochs=2, autocast=False):
    """The plain loop; returns the losses."""
    optimizer, losses = sgd(model.parameters()), []
    model.train()
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class Losses:
    """Keeps the loss of every step."""

    def __init__(self):
        self.values, self.weights = [], []

    @hookimpl(reads=("loss", "step.weight"))
    def step_end(self, step):
        self.values.append(step.loss.item())
        self.weights.append(float(step.weight))


@pytest.mark.parametrize(("make", "batches"), [(gpt2, texts()), (bert, classes())], ids=["gpt2", "bert"])
def test_training_is_bitwise_the_loop_by_hand(make, batches):
    model, seen = make(), Losses()
    torch.manual_seed(1)
    learner(model, seen).fit(batches, epochs=2)
    other = make()
    torch.manual_seed(1)
    assert seen.values == by_hand(other, batches)
    assert same(weights(model), weights(other))


def test_autocast_is_bitwise_the_loop_by_hand():
    model, other = gpt2(), gpt2()
    torch.manual_seed(1)
    learner(model, MixedPrecision("bfloat16")).fit(texts(), epochs=2)
    torch.manual_seed(1)
    by_hand(other, texts(), autocast=True)
    assert same(weights(model), weights(other))


def test_gradient_checkpointing_changes_no_bit():
    model, other = gpt2(use_cache=False), gpt2(use_cache=False)
    model.activation_checkpointing_enable()
    for each in (model, other):
        torch.manual_seed(1)
        learner(each, MixedPrecision("bfloat16")).fit(texts(), epochs=1)
    assert same(weights(model), weights(other))


def test_tied_weights_stay_tied():
    model = gpt2()
    learner(model, ToDevice("cpu")).fit(texts(), epochs=1)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_accumulated_gradients_are_those_of_one_big_batch_by_tokens(make):
    parts = texts(4) if make is gpt2 else classes(4)
    models = [make(dropout=0.0) if make is gpt2 else make().eval() for _ in range(2)]
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.config.use_cache = False
    learner(models[0].double(), accumulate=4).fit(parts, epochs=1)
    learner(models[1].double()).fit([joined(parts)], epochs=1)
    largest = max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True))
    # One update in float64; the sums are taken in another order, and the loss itself is computed in float32 (the model
    # casts its logits): 1e-7 of gradients of the order of 1, times the rate of 0.1.
    assert largest < 1e-7


def unlabelled(batch):
    """The batch with all of its labels masked."""
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_labels_counts_for_nothing_in_a_window_and_in_metrics(first):
    batch, none = texts(2)
    none = unlabelled(none)
    models = [gpt2(dropout=0.0), gpt2(dropout=0.0)]
    used, alone = (learner(model, Metrics(Perplexity()), accumulate=2, standard=True) for model in models)
    used.fit([none, batch] if first else [batch, none], [none, batch], epochs=1)
    alone.fit([batch], [batch], epochs=1)
    # float32: multiplied by w and by 1 / w where the batch without labels begins the window
    assert all(
        torch.allclose(*pair, rtol=1e-6, atol=1e-7) for pair in zip(*(m.parameters() for m in models), strict=True)
    )
    for name in ("train/loss", "train/perplexity", "val/loss", "val/perplexity"):
        assert used.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("make", "parts"), [(gpt2, texts(2)), (bert, classes(2))], ids=["gpt2", "bert"])
def test_batches_without_labels_leave_the_weights_as_they_are(make, parts, accumulate):
    model, seen = make(), Losses()
    before = weights(model)
    used = learner(model, seen, Metrics(), accumulate=accumulate, standard=True)
    used.fit([unlabelled(batch) for batch in parts], epochs=1)
    assert (seen.values, seen.weights) == ([0.0, 0.0], [0.0, 0.0])
    assert same(before, weights(model))
    assert math.isnan(used.metrics["train/loss"])  # a mean over no labels


def test_a_mean_over_steps_would_not_be_that_of_one_big_batch():
    """The batches above differ enough in tokens for the weights to matter."""
    parts, model = texts(4), gpt2(dropout=0.0)
    counts = [batch["labels"][:, 1:].ne(-100).sum().item() for batch in parts]
    losses = [model(**batch).loss.item() for batch in parts]
    whole = model(**joined(parts)).loss.item()
    assert abs(sum(losses) / 4 - whole) > 1e-4
    assert sum(c * x for c, x in zip(counts, losses, strict=True)) / sum(counts) == pytest.approx(whole, rel=1e-6)


def test_the_weight_of_a_step_is_its_number_of_labels_that_count():
    seen = Losses()
    learner(gpt2(), seen).fit(texts(), epochs=1)
    assert seen.weights == [batch["labels"][:, 1:].ne(-100).sum().item() for batch in texts()]


def test_perplexity_and_accuracy_are_those_of_all_tokens_together():
    model, batches = gpt2(), texts(4)
    used = learner(model, Metrics(Perplexity(), Accuracy(ignore_index=-100)))
    found = used.evaluate(batches)
    whole = joined(batches)
    model.eval()
    with torch.no_grad():
        logits = model(**whole).logits[:, :-1].double()
    labels = whole["labels"][:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    kept = labels.ne(-100)
    assert found["val/accuracy"] == (logits.argmax(-1).eq(labels) & kept).sum().item() / kept.sum().item()
    assert found["val/perplexity"] == pytest.approx(loss.exp().item(), rel=1e-6)  # the model's loss is float32
    assert VOCABULARY / 2 < found["val/perplexity"] < VOCABULARY * 2


def test_perplexity_does_not_depend_on_how_tokens_are_cut_into_batches():
    model = gpt2()
    values = [
        learner(model, Metrics(Perplexity())).evaluate(batches)["val/perplexity"]
        for batches in (texts(), [joined(texts())])
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)  # means of float32 losses


class Shapes:
    """The shapes of outputs and targets at loss_begin."""

    @hookimpl(reads=("outputs", "targets", "inputs"))
    def loss_begin(self, step):
        self.outputs, self.targets = tuple(step.outputs.shape), tuple(step.targets.shape)
        self.inputs = sorted(step.inputs)


def masked_lm():
    return BertForMaskedLM(BertConfig(**bert_sizes()))


def t5():
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize(("make", "length"), [(gpt2, 11), (masked_lm, 12), (t5, 12)], ids=["gpt2", "masked", "t5"])
def test_outputs_and_targets_stand_side_by_side(make, length):
    seen = Shapes()
    learner(make(), seen).fit(texts(1), epochs=1)
    assert (seen.outputs, seen.targets) == ((3, length, VOCABULARY), (3, length))
    assert seen.inputs == ["attention_mask", "input_ids"]


def test_a_batch_encoding_is_moved_and_trained_on_like_a_dict():
    models = [gpt2(), gpt2()]
    for model, batches in zip(models, (texts(), [BatchEncoding(batch) for batch in texts()]), strict=True):
        torch.manual_seed(1)
        learner(model, ToDevice("cpu")).fit(batches, epochs=1)
    assert same(*map(weights, models))


def test_prediction_gives_the_logits_of_the_whole_input():
    model = gpt2()
    outputs = learner(model).predict(texts(2))
    model.eval()
    assert torch.equal(outputs, torch.cat([model(**batch).logits for batch in texts(2)]))


def test_prediction_by_the_standard_phase_names_the_one_to_take():
    made = Learner(gpt2(), optimizer=torch.optim.SGD, phases=[TrainingPhase()], standard=False)
    with pytest.raises((AttributeError, TypeError)) as raised:
        made.predict(texts(1))
    assert "learner.predict(data, PredictionPhase()) with that of loopkit_huggingface" in raised.value.__notes__[0]


def test_a_regression_counts_by_samples_and_has_outputs_like_its_targets():
    seen = Losses()
    batches = [{**batch, "labels": batch["labels"].float()} for batch in classes(2)]

    def error(outputs, targets):
        assert outputs.shape == targets.shape == (5,)
        return (outputs - targets).square()

    model = bert(labels=1).eval()
    used = learner(model, seen, Metrics(error), standard=True)
    used.fit(batches, batches, epochs=1)
    assert seen.weights == [5.0] * 4
    assert used.metrics["val/error"] == pytest.approx(used.metrics["val/loss"], rel=1e-6)  # both float32


class Doubled(nn.Module):
    """A model of its own kind, which returns a plain dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, y=None):
        logits = x * self.weight
        return {"logits": logits} | ({} if y is None else {"loss": (logits - y).square().mean()})


def doubled(*plugins):
    model = Doubled()
    batches = [{"x": torch.ones(2, 3), "y": torch.zeros(2, 3)}]
    learner(model, *plugins, phases=[TrainingPhase("train", labels="y")]).fit(batches, epochs=1)
    return model.weight


def test_any_model_that_returns_a_loss_will_do():
    assert torch.equal(doubled(), torch.full((3,), 1 - 0.1 * 2 / 3))


class Tuple(Doubled):
    """Returns a tuple, as models of transformers do with ``return_dict=False``."""

    def forward(self, x, labels=None):
        return tuple(reversed(super().forward(x, labels).values()))


def test_a_model_that_returns_a_tuple_will_do():
    batches = [{"x": torch.ones(2, 3), "labels": torch.zeros(2, 3)}]
    model = Tuple()
    result = learner(model, Shapes(), Metrics()).fit([{**batches[0], "labels": torch.zeros(2, 3)}], batches, epochs=1)
    assert torch.equal(model.weight, doubled())
    assert result.metrics["val/loss"] > 0
    assert learner(model).predict(batches).shape == (2, 3)


def test_a_tuple_of_a_model_of_transformers_is_taken_apart():
    models = [bert(), bert()]
    models[1].config.return_dict = False
    for model in models:
        torch.manual_seed(1)
        learner(model, Metrics(Accuracy())).fit(classes(2), classes(1), epochs=1)
    assert same(*map(weights, models))


def test_a_tuple_with_several_outputs_is_left_whole():
    class Two(Tuple):
        def forward(self, x, labels=None):
            return (*super().forward(x, labels), x)

    batches = [{"x": torch.ones(2, 3), "labels": torch.zeros(2, 3)}]
    model = Two()
    learner(model).fit(batches, epochs=1)
    assert torch.equal(model.weight, doubled())
    assert [tuple(each.shape) for each in learner(model).predict(batches)] == [(2, 3), (2, 3)]


def test_a_tuple_without_a_loss_is_refused():
    with pytest.raises(LossError, match="Tuple returned no loss"):
        learner(Tuple()).fit([{"x": torch.ones(2, 3)}], epochs=1)


def test_a_compiled_model_will_do():
    assert torch.equal(doubled(Compile(backend="eager")), doubled())


def test_a_term_of_your_own_is_added_to_the_loss():
    class Penalised(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return super().loss(learner, outputs, targets) + outputs.logits.square().mean()

    seen, plain = Losses(), Losses()
    learner(gpt2(0.0), seen, phases=[Penalised()]).fit(texts(1), epochs=1)
    learner(gpt2(0.0), plain).fit(texts(1), epochs=1)
    assert seen.values[0] > plain.values[0]


def test_a_batch_that_is_no_mapping_is_refused():
    batches = [(batch["input_ids"], batch["labels"]) for batch in texts(1)]
    with pytest.raises(PhaseInputError, match=r"calls model\(\*\*batch\), and this batch is tuple\(Tensor\[3, 12\]"):
        learner(gpt2()).fit(batches, epochs=1)


@pytest.mark.parametrize(("key", "note"), [("ids", "ids"), ("labls", "labls (did you mean 'labls'?)")])
def test_missing_labels_are_said(key, note):
    batches = [{"input_ids": batch["input_ids"], key: batch["labels"]} for batch in texts(1)]
    with pytest.raises(LossError, match=r"GPT2LMHeadModel returned no loss.*the batch has no 'labels'") as caught:
        learner(gpt2()).fit(batches, epochs=1)
    assert f"the batch has input_ids, {note}" in caught.value.__notes__


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = BertModel(BertConfig(**bert_sizes()))

    def forward(self, labels=None, **inputs):
        return self.model(**inputs)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(LossError, match=r"Headless returned no loss.*take a class with a head"):
        learner(Headless()).fit(texts(1), epochs=1)


def test_other_outputs_at_loss_begin_are_refused():
    class Smooth:
        @hookimpl(updates=("targets",))
        def loss_begin(self, step):
            step.targets = step.targets.clone()

    with pytest.raises(PhaseError, match="a plugin put other outputs or targets on the step at loss_begin"):
        learner(gpt2(), Smooth()).fit(texts(1), epochs=1)


def test_inputs_and_labels_put_there_at_forward_begin_are_what_the_model_takes():
    class Cut:
        @hookimpl(updates=("inputs", "targets"))
        def forward_begin(self, step):
            step.inputs = {name: value[:, :4] for name, value in step.inputs.items()}
            step.targets = step.targets[:, :4]

    whole = texts(2)
    cut = [{name: value[:, :4] for name, value in batch.items()} for batch in whole]
    one, other = learner(gpt2(), Cut()), learner(gpt2())
    for each, data in ((one, whole), (other, cut)):
        torch.manual_seed(0)  # dropout
        each.fit(data, epochs=1)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_phases_are_of_the_kinds_that_plugins_ask_for():
    import loopkit

    for one, other in ((TrainingPhase, loopkit.TrainingPhase), (ValidationPhase, loopkit.ValidationPhase)):
        assert issubclass(one, other)
        assert (one().name, one().emits) == (other().name, other().emits)
    assert issubclass(PredictionPhase, loopkit.PredictionPhase)
