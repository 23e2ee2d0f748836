"""Loaders of datasets: orders, positions, and fits that are killed in mid-epoch and go on."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from small import gpt2, learner, same, weights
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from loopkit import data, every, hookimpl
from loopkit.data import LoaderError, TensorLoader
from loopkit.errors import EmptyDataError, StateError
from loopkit.plugins import Checkpoint
from loopkit_huggingface import DatasetLoader, StreamLoader


def rows(count=10):
    return [{"input_ids": [n % 40, n, 1, 2], "labels": [n % 40, n, 1, 2]} for n in range(count)]


def table(count=10):
    return Dataset.from_list(rows(count))


def stream(count=10, **options):
    return IterableDataset.from_generator(rows, gen_kwargs={"count": count}, **options)


def ids(loader):
    return [batch["input_ids"][:, 1].tolist() for batch in loader]


def assert_goes_on_anywhere(make, expected):
    """A loader whose state was saved after any batch goes on with the next one in another loader."""
    for count in range(len(expected)):
        loader, seen = make(), []
        while len(seen) < count:
            for batch in loader:
                seen.append(batch)
                if len(seen) == count:
                    break
        again = make()
        again.load_state_dict(loader.state_dict())
        rest = ids(again)
        while len(rest) < len(expected) - count:
            rest += ids(again)
        assert rest == expected[count:]


def test_the_samples_come_in_the_order_of_a_tensor_loader():
    loader = DatasetLoader(table(), batch_size=4, shuffle=True, seed=3)
    plain = TensorLoader(torch.arange(10), batch_size=4, shuffle=True, seed=3)
    for _ in range(2):
        assert ids(loader) == [batch.tolist() for batch in plain]
    assert len(loader) == 3
    assert loader.epoch == 2


@pytest.mark.parametrize("kind", [list, Dataset.from_list, lambda rows: Dataset.from_list(rows).with_format("torch")])
def test_any_dataset_with_an_index_will_do(kind):
    batches = list(DatasetLoader(kind(rows(3)), batch_size=2))
    assert [batch["labels"].tolist() for batch in batches] == [[[0, 0, 1, 2], [1, 1, 1, 2]], [[2, 2, 1, 2]]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_position_is_gone_on_from(drop_last):
    def make():
        return DatasetLoader(table(), batch_size=3, shuffle=True, seed=1, drop_last=drop_last)

    whole = make()
    expected = ids(whole) + ids(whole)
    assert_goes_on_anywhere(make, expected)


@pytest.mark.parametrize("tail", ["uneven", "pad", "drop"])
def test_processes_share_the_samples_as_those_of_a_tensor_loader(tail):
    loader = DatasetLoader(table(11), batch_size=2, shuffle=True)
    plain = TensorLoader(torch.arange(11), batch_size=2, shuffle=True)
    for rank in range(2):
        assert ids(loader.shard(rank, 2, tail)) == [batch.tolist() for batch in plain.shard(rank, 2, tail)]


def test_a_state_of_one_process_fits_two():
    loader = DatasetLoader(table(), batch_size=2, shuffle=True)
    expected = ids(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    parts = [DatasetLoader(table(), batch_size=1, shuffle=True).shard(rank, 2) for rank in range(2)]
    for part in parts:
        part.load_state_dict(loader.state_dict())
    found = [sorted(a + b) for a, b in zip(*map(ids, parts), strict=True)]
    assert found == [sorted(batch) for batch in expected[1:]]


def test_numbers_drawn_for_a_sample_are_the_same_where_the_epoch_is_resumed():
    def noisy(sample, generator):
        return {"x": sample["input_ids"][1] + torch.rand((), generator=generator)}

    def make():
        return DatasetLoader(data.seeded(table(), noisy), batch_size=3, shuffle=True, seed=2)

    expected = [batch["x"] for batch in make()]
    loader = make()
    next(iter(loader))
    again = make()
    again.load_state_dict(loader.state_dict())
    assert all(torch.equal(a["x"], b) for a, b in zip(again, expected[1:], strict=True))


@pytest.mark.parametrize(
    ("shuffled", "replay"), [(False, True), (True, True), (False, False)], ids=["plain", "shuffled", "state"]
)
def test_a_stream_goes_on_from_each_position(shuffled, replay):
    def make():
        dataset = stream().map(lambda row: row)
        return StreamLoader(dataset.shuffle(seed=0, buffer_size=4) if shuffled else dataset, 3, replay=replay)

    whole = make()
    expected = ids(whole) + ids(whole)
    assert len(expected) == 8
    assert (expected[:4] == expected[4:]) is not shuffled
    assert_goes_on_anywhere(make, expected)


def test_a_stream_goes_on_where_a_pass_was_left():
    loader = StreamLoader(stream(), batch_size=4)
    assert next(iter(loader))["input_ids"][:, 1].tolist() == [0, 1, 2, 3]
    assert ids(loader) == [[4, 5, 6, 7], [8, 9]]
    assert ids(loader)[0] == [0, 1, 2, 3]


def test_a_stream_can_leave_the_last_batch_out():
    loader = StreamLoader(stream(), batch_size=4, drop_last=True)
    assert ids(loader) == ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_stream_that_became_shorter_is_refused():
    loader = StreamLoader(stream(10), batch_size=4)
    batches = iter(loader)
    next(batches), next(batches)
    again = StreamLoader(stream(5), batch_size=4)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="epoch 1 of the dataset ended after 5 samples, but 8 were used before"):
        next(iter(again))


def test_numbers_of_samples_per_batch_can_change_in_a_stream():
    loader = StreamLoader(stream(), batch_size=4)
    next(iter(loader))
    again = StreamLoader(stream(), batch_size=3)
    again.load_state_dict(loader.state_dict())
    assert ids(again) == [[4, 5, 6], [7, 8, 9]]


class Killed(Exception):
    """Ends a fit."""


class KillAt:
    def __init__(self, step):
        self.step = step

    @hookimpl
    def step_begin(self, learner, phase):
        if phase.training and learner.progress.steps == self.step:
            raise Killed


class PauseAt:
    def __init__(self, step):
        self.step = step

    @hookimpl
    def step_end(self, learner):
        if learner.progress.steps == self.step:
            learner.pause("test")


def random_mask(rows):
    """A collator that draws from torch's generator."""
    batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
    batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = -100
    batch["labels"][:, -1] = 2
    return batch


LOADERS = {
    "table": lambda: DatasetLoader(table(), 3, shuffle=True, collate=random_mask),
    "stream": lambda: StreamLoader(stream().shuffle(seed=1, buffer_size=4), 3, collate=random_mask),
    "state": lambda: StreamLoader(stream(), 3, collate=random_mask, replay=False),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_killed_in_mid_epoch_ends_with_the_same_bits(make, step, tmp_path):
    def run(model, *plugins, **options):
        used = learner(model, *plugins, seed=0, standard=True)
        used.fit(make(), make(), epochs=2, **options)
        return used

    whole = gpt2()
    expected = run(whole)

    def saved():
        return Checkpoint(tmp_path, save=every(updates=1), resume="auto")

    with pytest.raises(Killed):
        run(gpt2(), saved(), KillAt(step))
    model = gpt2()
    found = run(model, saved())
    assert same(weights(model), weights(whole))
    assert found.metrics == expected.metrics
    assert found.progress == expected.progress


def test_a_loader_of_torch_over_a_dataset_goes_on_too():
    """With workers, for samples that take long to decode: a ResumableSampler is all it takes."""
    loader = DataLoader(table().with_format("torch"), 4, sampler=data.ResumableSampler(10, shuffle=False))
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert ids(loader) == ids(DatasetLoader(table(), 4))


def stacked(rows):
    return {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}


def sharded(shards):
    for shard in shards:
        for row in rows(4):
            yield {"input_ids": [shard, *row["input_ids"][1:]], "labels": row["labels"]}


def streamed(loader, shuffled, workers):
    dataset = IterableDataset.from_generator(sharded, gen_kwargs={"shards": [3, 4, 5, 6]})
    dataset = dataset.shuffle(seed=1, buffer_size=3) if shuffled else dataset
    collate = random_mask if loader is DataLoader else stacked  # the state has no generators of workers
    return loader(dataset, batch_size=2, num_workers=workers, collate_fn=collate)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's use of torch
@pytest.mark.parametrize(
    ("loader", "shuffled", "workers"),
    [(StatefulDataLoader, False, 0), (StatefulDataLoader, False, 2), (DataLoader, True, 2)],
)
@pytest.mark.parametrize("step", [3, 11])
def test_a_stream_in_loaders_goes_on_with_the_same_bits_and_whole_epochs(loader, shuffled, workers, step):
    def run(model, *plugins, state=None):
        used = learner(model, *plugins, seed=0)
        if state is not None:
            used.load_state_dict(state)
        used.fit(streamed(loader, shuffled, workers), epochs=2, on_interrupt="return")
        return used

    whole, cut, again = gpt2(), gpt2(), gpt2()
    expected = run(whole)
    assert expected.progress.steps == 16
    first = run(cut, PauseAt(step))
    first.remove("pause_at")
    found = run(again, state=first.state_dict())
    assert same(weights(again), weights(whole))
    assert found.progress == expected.progress


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_the_buffer_of_a_shuffled_stream_is_refused_in_a_stateful_loader():
    used = learner(gpt2(), PauseAt(3), seed=0)
    with pytest.warns(UserWarning, match=r"Give torch\.utils\.data\.DataLoader in place of StatefulDataLoader"):
        used.fit(streamed(StatefulDataLoader, True, 0), epochs=2, on_interrupt="return")
    with pytest.raises(StateError, match=r"Give torch\.utils\.data\.DataLoader in place of StatefulDataLoader"):
        used.state_dict()


@pytest.mark.parametrize("make", [lambda rows: DatasetLoader(rows, 2), lambda rows: StreamLoader(rows, 2)])
def test_a_batch_whose_labels_are_all_masked_is_warned_of(make):
    some = [*rows(1), {"input_ids": [1, 2, 3, 4], "labels": [-100] * 4}]
    assert len(list(make(some))) == 1
    assert len(list(make([{"input_ids": row["input_ids"]} for row in some]))) == 1
    with pytest.warns(UserWarning, match=r"all labels of a batch are -100, so it counts as 0\. If that is not"):
        assert len(list(make([some[1]] * 2))) == 1


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "a": 2}, "[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")


def test_a_collator_with_numbers_of_its_own_is_refused():
    DatasetLoader(table(), 2, collate=DataCollatorForLanguageModeling(tokenizer()))
    with pytest.raises(LoaderError, match="DataCollatorForLanguageModeling with seed=1"):
        DatasetLoader(table(), 2, collate=DataCollatorForLanguageModeling(tokenizer(), seed=1))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: DatasetLoader(stream(), 2), LoaderError, "StreamLoader takes"),
        (lambda: DatasetLoader(table(), 0), LoaderError, "batch_size is 0"),
        (lambda: DatasetLoader(table(), 2, collate="pad"), LoaderError, "collate is str"),
        (lambda: DatasetLoader(table(), 2, seed="a"), LoaderError, "seed"),
        (lambda: DatasetLoader([], 2), EmptyDataError, "the dataset holds 0 samples"),
        (lambda: DatasetLoader(table(1), 2, drop_last=True), EmptyDataError, "with drop_last=True"),
        (lambda: StreamLoader(iter(rows()), 2), LoaderError, "no iterator"),
        (lambda: StreamLoader(rows(), 2, replay=False), LoaderError, "which has no state"),
        (
            lambda: StreamLoader(stream().shuffle(buffer_size=4), 2, replay=False),
            LoaderError,
            "the dataset is shuffled",
        ),
        (
            lambda: StreamLoader(stream().shuffle(buffer_size=4).map(dict).take(2), 2, replay=False),
            LoaderError,
            "the dataset is shuffled",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_column_of_texts_is_named_where_the_collator_fails():
    dataset = Dataset.from_dict({"text": ["a", "b"], "input_ids": [[1], [2]]})
    with pytest.raises(ValueError, match="too many dimensions") as raised:
        next(
            iter(DatasetLoader(dataset, 2, collate=lambda rows: {"text": torch.tensor([row["text"] for row in rows])}))
        )
    assert raised.value.__notes__ == ["there is text in ['text']: leave it out, dataset.remove_columns(['text'])"]
